//! Who this agent is, and whom it trusts.

pub mod enrollment;
pub mod join;
pub mod joining;
mod key;
pub(crate) mod secret;
pub mod store;
pub mod trusted_roots;
