//! The agent of one member: its process, its credentials, and its session with the hub.
//!
//! It runs `krypton-reconciler` and sends the reports. It knows nothing of the home cluster, of the hub's objects, or of
//! planning.
//!
//! Modules import in this order: `check` → `app` → `session`, `credentials` → `args`.

pub mod app;
pub mod args;
pub mod check;
pub mod credentials;
pub mod dump;
#[cfg(test)]
pub(crate) mod fake_hub;
pub mod metrics;
pub mod session;
