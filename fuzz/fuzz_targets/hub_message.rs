#![no_main]

krypton_fuzz::target!(krypton_proto::fuzzing::hub_message);
