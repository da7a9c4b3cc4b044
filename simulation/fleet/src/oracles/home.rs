//! What the home cluster shows of its members at the end.

use krypton_types::names::{GROUP, SELF_CLUSTER};

use super::view::{condition, is_deleted, is_ready, number};
use super::{Check, Oracle, View, ensure, stateless};
use crate::plan::{HOME, Settings};

pub(super) fn all() -> Vec<Box<dyn Oracle>> {
    vec![Box::new(HomeCounts), Box::new(SeparatedIsReported)]
}

stateless! {
    /// The status of an EdgeCluster counts the Tenants of its cluster.
    HomeCounts, "home-counts-tenants",
    fn quiet(&mut self, view: &View) -> Check {
        if view.without_hub {
            return Ok(());
        }
        for (name, member) in view.converging() {
            let tenants: Vec<_> = view.all(Settings::cluster(name), GROUP, "tenants").collect();
            // On home, not each Tenant is of the member.
            if name == SELF_CLUSTER || tenants.iter().any(|(_, tenant)| is_deleted(tenant)) {
                continue;
            }
            let ready = tenants.iter().filter(|(_, tenant)| is_ready(tenant)).count();
            let real = [tenants.len() as u64, ready as u64];
            let counted = ["total", "ready"].map(|part| number(member, &format!("/status/tenants/{part}")).unwrap_or_default());
            ensure(counted == real, || format!("{name} has {real:?} Tenants, and home counts {counted:?}"))?;
        }
        Ok(())
    }
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
    fn wrong_count_of_tenants_is_found() {
        for (total, oracle) in [(1, None), (2, Some("home-counts-tenants"))] {
            let found = Story::after(|story| {
                let counts = json!({"status": {"tenants": {"total": total, "ready": 1}}});
                story.patch("hub-0", "home", edge_cluster("edge-1"), &counts);
            });
            assert_eq!(found.as_deref(), oracle);
        }
    }

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
