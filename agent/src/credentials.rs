//! Identity of the agent, and the root certificates that it trusts.

pub mod enrollment;
pub mod identity;
pub mod join;
pub(crate) mod joining;
mod key;
pub mod renewal;
pub(crate) mod secret;
pub mod store;
pub mod trusted_roots;
