//! Aggregates the reports of all members into the status of home's Tenants. On home, only this module
//! writes it.

mod concerns;
mod controller;
mod placement;
mod placement_orders;
mod simulation;
mod status;
mod summary;

pub use crate::members::tenant_reports::{
    Changed, Counts, Hearing, Reports, Retired, TENANTS_MAX, Target, Targets,
};
pub use controller::run;
pub use simulation::Rehearsal;
pub use status::Rules;

#[cfg(test)]
mod tests;
