"""What tests share: the command, hosts on one machine, EC2 in a box, a Hub, and faults at will."""
