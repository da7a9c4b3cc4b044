#![no_main]

krypton_fuzz::target!(krypton_runtime::fuzzing::durations);
