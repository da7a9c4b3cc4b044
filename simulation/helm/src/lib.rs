//! A simulated Helm: reads the real command line, kubeconfig, chart and values, and leaves what Helm leaves, step by
//! step through the API. A table compares it with Helm after success, failure and a kill at each request.
//!
//! It renders no templates: a test chart lists its objects in the file `sim.json`.

pub mod arguments;
pub mod chart;
pub mod run;
#[cfg(feature = "table")]
pub mod table;

mod api;
mod fault;
mod hooks;
mod install;
mod kinds;
mod objects;
mod patch;
mod release;
mod render;
mod rollback;
mod session;
mod store;
mod uninstall;
mod upgrade;
