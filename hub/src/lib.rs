//! The hub: discovers the members, gives each its desired state, aggregates their reports, and serves their agents.
//!
//! It drives `krypton-reconciler` for the home cluster and for members without an agent. It knows neither the agent's
//! crate nor that Helm is a process.
//!
//! Modules import in this order: `app` → `agent_server`, `edgecluster`, `tenants`, `deployments`, `observe` → `proxy` →
//! `ca`, `discovery`, `chart` → `members` → `home_events`, `notify` → `leader`, `home`, `args`. Only `args` also names
//! types of `discovery` and `chart`.

pub mod agent_server;
pub mod app;
pub mod args;
pub mod ca;
pub mod chart;
pub mod deployments;
pub mod discovery;
pub mod edgecluster;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing;
pub mod home;
pub mod home_events;
pub mod leader;
pub mod members;
mod notify;
pub mod observe;
pub mod proxy;
pub mod tenants;
