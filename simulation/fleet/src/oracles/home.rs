//! What the home cluster shows of a member that is lost for good.

use krypton_types::names::GROUP;

use super::view::condition;
use super::{Check, Oracle, View, ensure, stateless};
use crate::plan::HOME;

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![Box::new(SeparatedIsReported)]
}

stateless! {
    /// Home reports a member whose API server is lost for good, and no Tenant as ready there.
    SeparatedIsReported, "separated-member-is-reported",
    fn quiet(&mut self, view: &View) -> Check {
        let Some(name) = view.excused.as_deref() else {
            return Ok(());
        };
        let connected = view.edge_cluster(name).and_then(|member| condition(member, "Connected"));
        ensure(connected.is_none_or(|(status, _)| status != "True"), || {
            format!("{name} is lost, and shown as {connected:?}")
        })?;
        for (key, tenant) in view.all(HOME, GROUP, "tenants") {
            let there = condition(tenant, &format!("ClusterReady/{name}"));
            let status = there.map(|(status, _)| status);
            let all = condition(tenant, "Ready").map(|(status, _)| status);
            let right = status.is_none() || status == Some("Unknown") && all != Some("True");
            ensure(right, || format!("{} is {all:?}, on the lost {name} {there:?}", key.name))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{Story, edge_cluster};
    use super::*;

    #[test]
    fn lost_member_shown_as_connected_is_found() {
        let there = |status: &str| json!([{"type": "Connected", "status": status, "reason": "R"}]);
        for (status, right) in [("False", true), ("True", false)] {
            let mut member = edge_cluster("edge-1");
            member["status"]["conditions"] = there(status);
            let mut story = Story::of("edges edge-1:agent\n1.000 server edge-1 down for ever");
            story.put("hub-0", "home", member);
            assert_eq!(SeparatedIsReported.quiet(story.view()).is_ok(), right);
        }
    }
}
