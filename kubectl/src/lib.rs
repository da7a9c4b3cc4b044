//! `kubectl krypton`: shows and changes the fleet from a terminal, with the rights of the person who runs it.
//!
//! It reads and writes Kubernetes objects and asks debug ports. It knows neither the hub's crate nor the protocol of hub
//! and agents nor the reconciler, and imports `krypton-helm` (to read releases), `krypton-runtime` and what is below.

mod cli;
mod commands;
mod complete;
mod debug_port;
mod error;
mod explain;
mod home;
pub mod join_info;
pub mod join_token;
mod render;

pub use cli::{Cli, run};
pub use commands::join::JoinError;
pub use commands::replace::ReplaceError;
pub use commands::rotate_ca::RotateCaError;
pub use error::{ExitCode, KubectlError, MEANINGS};
pub use render::Printed;

#[cfg(test)]
mod tests;
