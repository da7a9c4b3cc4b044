//! The state that the home cluster shows of a member that is permanently lost.

use krypton_types::names::GROUP;

use super::{CheckResult, Oracle, View, ensure, invariant};
use crate::object::condition;
use crate::plan::HOME;

invariant! {
    /// Home reports a member whose API server is permanently lost, and no Tenant as ready there.
    SeparatedMemberIsReported, "separated-member-is-reported",
    fn check_converged(&mut self, view: &View) -> CheckResult {
        let Some(name) = view.separated_member.as_deref() else {
            return Ok(());
        };
        let connected = view.edge_cluster(name).and_then(|member| condition(member, "Connected"));
        ensure(connected.is_none_or(|(status, _)| status != "True"), || {
            format!("{name} is lost, and shown as {connected:?}")
        })?;
        for (key, tenant) in view.objects(HOME, GROUP, "tenants") {
            let member_condition = condition(tenant, &format!("ClusterReady/{name}"));
            let status = member_condition.map(|(status, _)| status);
            let ready = condition(tenant, "Ready").map(|(status, _)| status);
            let is_correct = status.is_none() || status == Some("Unknown") && ready != Some("True");
            ensure(is_correct, || {
                format!("{} is {ready:?}, on the lost {name} {member_condition:?}", key.name)
            })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::story::{History, edge_cluster};
    use super::*;

    #[test]
    fn lost_member_shown_as_connected_is_found() {
        let conditions =
            |status: &str| json!([{"type": "Connected", "status": status, "reason": "R"}]);
        for (status, broken) in [("False", false), ("True", true)] {
            let mut member = edge_cluster("edge-1");
            member["status"]["conditions"] = conditions(status);
            let mut history =
                History::from_plan("edges edge-1:agent\n1.000 server edge-1 down for ever");
            history.put("hub-0", "home", member);
            assert_eq!(history.breaks(SeparatedMemberIsReported::default()), broken);
        }
    }
}
