"""`icom bench`: how fast the machine trains, against the field's usual step."""
