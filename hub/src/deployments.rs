//! KryptonDeployments: selects the member for each, sends it the orders, and writes the status of home's
//! object. The member's reconciler runs Helm.

mod api;
mod controller;
mod events;
mod plan;
mod target;

pub(crate) use controller::{DeploymentController, run};
