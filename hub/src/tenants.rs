//! Aggregates the reports of all members into the status of home's Tenants. On home, only this module
//! writes it.

mod controller;
mod index;
mod placement;
mod placement_orders;
mod simulation;
mod status;
mod summary;

pub use controller::run;
pub use simulation::HomeSimulation;
pub use status::TenantSettings;

#[cfg(test)]
mod tests;
