//! The chart of the fleet: which version, with which credentials and values.

pub mod credentials;
pub mod values;
pub mod values_file;
pub mod values_reader;
pub mod values_status;
pub mod version_pin;
