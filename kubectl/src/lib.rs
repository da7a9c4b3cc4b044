//! `kubectl krypton`: shows and changes the fleet from a terminal, with the user's permissions.
//!
//! The crate reads and writes Kubernetes objects and queries debug ports. It depends on `krypton-helm` (to read
//! releases), `krypton-runtime` and the crates below them. It does not depend on the hub, the protocol of hub and
//! agents, or the reconciler.

mod check;
mod cli;
mod commands;
mod complete;
mod debug_port;
mod error;
mod explain;
mod fleet_tenants;
mod helm;
mod home;
pub mod join_info;
pub mod join_token;
mod json_path;
mod kind;
mod local_clock;
mod objects;
mod output;
mod program;
mod render;
mod running_pods;
mod statement;
mod tool;

pub use cli::{Cli, run};
pub use error::{CallError, ExitCode, KubectlError};
pub use home::Connection;
pub use render::CommandOutput;

#[cfg(test)]
mod tests;
