/* Stands for Pyxis (which no package has): a SPANK plugin that gives srun its options, and says in each task's
   environment what it was given. It makes no container. */
#include <slurm/spank.h>
#include <stdio.h>

SPANK_PLUGIN(stand_in_for_pyxis, 1)

static char given[3][4096];

static int keep(int value, const char *argument, int remote) {
    (void)remote;
    snprintf(given[value], sizeof given[value], "%s", argument);
    return ESPANK_SUCCESS;
}

static struct spank_option options[] = {
    {"container-image", "IMAGE", "image to run in", 1, 0, keep},
    {"container-mounts", "SOURCE:TARGET", "what the container sees", 1, 1, keep},
    {"container-workdir", "FOLDER", "where it starts", 1, 2, keep},
    SPANK_OPTIONS_TABLE_END,
};

int slurm_spank_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    /* As Pyxis: srun's options alone, and not sbatch's. */
    if (spank_context() == S_CTX_ALLOCATOR)
        return ESPANK_SUCCESS;
    for (int i = 0; options[i].name; i++)
        if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
            return ESPANK_ERROR;
    return ESPANK_SUCCESS;
}

int slurm_spank_task_init(spank_t spank, int count, char **arguments) {
    (void)count, (void)arguments;
    spank_setenv(spank, "STAND_IN_IMAGE", given[0], 1);
    spank_setenv(spank, "STAND_IN_MOUNTS", given[1], 1);
    spank_setenv(spank, "STAND_IN_WORKDIR", given[2], 1);
    return ESPANK_SUCCESS;
}
