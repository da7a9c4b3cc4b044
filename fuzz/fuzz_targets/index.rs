#![no_main]

krypton_fuzz::target!(krypton_agent::fuzzing::index);
