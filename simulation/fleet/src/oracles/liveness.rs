//! Stub.
use super::Oracle;
pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    Vec::new()
}
pub fn end_state(_: &super::View) -> std::collections::BTreeMap<String, String> {
    Default::default()
}
