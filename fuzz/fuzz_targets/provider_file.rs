#![no_main]

krypton_fuzz::target!(krypton_hub::fuzzing::provider_file);
