//! Simulates a Kubernetes API server: one ordered store with lists, watches, patches and CRDs, and the controllers
//! for namespaces and workloads. The state machine has no I/O, clock or randomness.
//!
//! It answers as a real API server does; a conformance table compares the two. It answers 501 to any other request,
//! because a model must not guess. It knows nothing of Krypton.

mod builtin;
mod cause;
pub mod conformance;
mod controllers;
mod crd;
mod decoder;
mod discovery;
mod fields;
mod garbage;
mod key;
mod kind;
mod list;
mod managed;
mod meta;
mod names;
mod namespaces;
mod objects;
mod patch;
mod render;
mod request;
mod resources;
mod schema;
mod selectors;
pub mod server;
mod status;
mod store;
mod tasks;
#[cfg(test)]
mod tests;
mod validate;
mod watch;
mod workloads;
mod write;
