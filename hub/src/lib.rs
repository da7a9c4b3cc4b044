//! The hub: discovery, fleet, desired state, proxies and status of the home cluster.

pub mod admin;
pub mod home;
pub mod kubectl;
pub mod settings;
pub mod values_file;
