"""What each command can be told: a dataclass per command, in the module of its name.

One option has one name: the flag, the YAML key and the dataclass field are the same word. `loading` brings flags and
files together; what is wrong with a configuration by itself is refused when it is made (`__post_init__`). Nothing
heavy is imported here: `icom --help` reads it all. The commands for EC2 have theirs in provisioning/config.py.
"""
