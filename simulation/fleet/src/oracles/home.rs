//! The state that the home cluster shows of a member that is permanently lost.

use krypton_types::conditions::reason::TENANT_GONE;
use krypton_types::names::GROUP;

use super::{CheckResult, Oracle, View, ensure, invariant};
use crate::object::condition;
use crate::plan::HOME;

invariant! {
    /// Home reports a member whose API server is permanently lost, and no Tenant as ready there. The member does not
    /// count for a Tenant that it no longer had in its last report.
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
            let was_gone = member_condition.is_some_and(|(_, reason)| reason == TENANT_GONE)
                && view.tenant(name, &key.name).is_none();
            let is_correct = status.is_none() || status == Some("Unknown") && (was_gone || ready != Some("True"));
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

    use super::super::story::{History, edge_cluster, tenant};
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

    #[test]
    fn ready_tenant_of_a_lost_member_is_found() {
        for (reason, is_there, broken) in [
            (TENANT_GONE, false, false),
            (TENANT_GONE, true, true),
            ("ClusterUnreachable", false, true),
        ] {
            let mut at_home = tenant();
            at_home["status"] = json!({"conditions": [
                {"type": "Ready", "status": "True", "reason": "R"},
                {"type": "ClusterReady/edge-1", "status": "Unknown", "reason": reason},
            ]});
            let mut history =
                History::from_plan("edges edge-1:agent\n1.000 server edge-1 down for ever");
            history.put("hub-0", "home", at_home);
            if is_there {
                history.put("people", "edge-1", tenant());
            }
            let is_broken = history.breaks(SeparatedMemberIsReported::default());
            assert_eq!(is_broken, broken, "{reason} {is_there}");
        }
    }
}
