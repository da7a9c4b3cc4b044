//! KryptonDeployments: which member each is for, what is ordered of it there, and what home's object says.
//! The work is done by the member's reconciler.

mod api;
mod controller;
mod events;
mod plan;
mod target;

pub use controller::{Controller, run};
