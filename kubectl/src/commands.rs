//! The commands that read or change objects.

pub(crate) mod accept_release;
pub(crate) mod change;
pub(crate) mod get;
pub(crate) mod install;
pub(crate) mod join;
pub(crate) mod leave;
pub(crate) mod log_level;
pub(crate) mod migrate;
pub(crate) mod quickstart;
pub(crate) mod replace;
pub(crate) mod rotate_ca;
pub(crate) mod support_bundle;
pub(crate) mod uninstall;
pub(crate) mod version;
