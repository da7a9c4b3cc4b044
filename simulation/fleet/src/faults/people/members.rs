//! Actions of people on members: changes of their EdgeClusters, join bundles and Secrets with kubeconfigs.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use krypton_sim_apiserver::server::Key;
use krypton_types::names;
use serde_json::{Value, json};

use super::{KRYPTON_API, text};
use crate::conductor::Simulation;
use crate::faults;
use crate::observe::Event;
use crate::plan::{Action, HOME, MemberAction, SYSTEM_NAMESPACE, TWIN_SUFFIX, UNTRUSTED_NAMESPACE};
use crate::stage;
use crate::time::Millis;
use crate::user_client::UserClient;

/// Time in which a replaced EdgeCluster disappears.
const REPLACEMENT_DELAY: Millis = 5_000;

pub(super) fn perform_member_action(
    simulation: &mut Simulation,
    member: &str,
    action: &MemberAction,
) {
    let path = format!("{KRYPTON_API}/edgeclusters/{member}");
    let mut client = UserClient::for_home(simulation);
    let spec = match action {
        MemberAction::Pause => json!({"paused": true}),
        MemberAction::Resume => json!({"paused": false}),
        MemberAction::Ban => json!({"banned": true}),
        MemberAction::Unban => json!({"banned": false}),
        MemberAction::Delete { uninstall } => {
            client.patch(
                &path,
                &json!({"spec": {"deletionPolicy": deletion_policy(*uninstall)}}),
            );
            client.delete(&path);
            return;
        }
        MemberAction::Policy { uninstall } => {
            json!({"deletionPolicy": deletion_policy(*uninstall)})
        }
        MemberAction::Allow { namespace } => {
            json!({"allowedNamespaces": namespace.as_ref().map(|name| vec![name])})
        }
        MemberAction::Orphan => {
            client.annotate(&path, names::ORPHAN_ANNOTATION, "true");
            return;
        }
        MemberAction::Rebuild => return faults::restore::rebuild(simulation, member),
        MemberAction::Replace => return replace_member(simulation, member),
        MemberAction::Rejoin => return rejoin_agent(simulation, member),
        MemberAction::AddTwin { .. } => return add_twin(simulation, member, action),
        MemberAction::AddElsewhere { .. } => return add_elsewhere(simulation, member, action),
        MemberAction::DamageKubeconfig { .. }
        | MemberAction::DeleteKubeconfig { .. }
        | MemberAction::RelabelKubeconfig { .. } => {
            return disturb_kubeconfig(simulation, member, action);
        }
    };
    client.patch(&path, &json!({"spec": spec}));
}

fn deletion_policy(uninstall: bool) -> &'static str {
    if uninstall { "Uninstall" } else { "Retain" }
}

/// Runs `kubectl krypton join --replace`: deletes the EdgeCluster and creates it again. An agent gets a new bundle.
fn replace_member(simulation: &mut Simulation, member: &str) {
    let collection = format!("{KRYPTON_API}/edgeclusters");
    let path = format!("{collection}/{member}");
    let mut client = UserClient::for_home(simulation);
    let Some(mut object) = client.get(&path) else {
        return;
    };
    client.annotate(&path, names::ORPHAN_ANNOTATION, "true");
    client.delete(&path);
    if let Some(fields) = object.as_object_mut() {
        fields.remove("status");
    }
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("finalizers");
    }
    let member = member.to_owned();
    let at = simulation.now() + REPLACEMENT_DELAY;
    simulation.schedule(at, move |simulation| {
        UserClient::for_home(simulation).create(&collection, &without_server_fields(object));
        if simulation.ip(&format!("agent-{member}")).is_some() {
            rejoin_agent(simulation, &member);
            simulation.start(&format!("agent-{member}"));
        }
    });
}

/// Runs `kubectl krypton join`, gives the bundle to the agent, and restarts it.
pub(in crate::faults) fn rejoin_agent(simulation: &mut Simulation, member: &str) {
    let path = format!("{KRYPTON_API}/edgeclusters/{member}");
    let mut client = UserClient::for_home(simulation);
    let uid = client
        .get(&path)
        .and_then(|object| Some(text(&object, "/metadata/uid")?.to_owned()));
    let host = format!("agent-{member}");
    if let Err(error) = stage::write_join_bundle(simulation, (member, uid.as_deref()), &host) {
        let text = format!("{member} gets no join bundle: {error:#}");
        simulation.record(Event::Fault { text });
    } else if simulation.is_running(&host) {
        simulation.crash(&host, Some(faults::RESTART_TIME));
    }
}

fn twin_name(member: &str) -> String {
    format!("{member}{TWIN_SUFFIX}")
}

fn elsewhere_name(member: &str) -> String {
    format!("{member}-{UNTRUSTED_NAMESPACE}")
}

/// Returns the namespace and name of the Secret from which this action adds a member for a time. The new member has
/// the Secret's name.
pub(in crate::faults) fn temporary_source(
    member: &str,
    action: &MemberAction,
) -> Option<(&'static str, String)> {
    match action {
        MemberAction::AddTwin { .. } => Some((SYSTEM_NAMESPACE, twin_name(member))),
        MemberAction::AddElsewhere { .. } => Some((UNTRUSTED_NAMESPACE, elsewhere_name(member))),
        _ => None,
    }
}

/// Deletes the EdgeCluster of this name if its Secret is gone, as its status suggests. A hub whose request was on its
/// way creates the EdgeCluster after people have deleted the Secret.
pub(in crate::faults) fn delete_member_without_source(
    simulation: &mut Simulation,
    (namespace, name): (&str, &str),
) {
    let secret = Key::new("", "secrets", namespace, name);
    let member = Key::new(names::GROUP, "edgeclusters", "", name);
    let exists = |key: &Key| simulation.object(HOME, key).is_some();
    if exists(&member) && !exists(&secret) {
        let uninstall = false;
        perform_member_action(simulation, name, &MemberAction::Delete { uninstall });
    }
}

fn add_twin(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let twin = twin_name(member);
    let collection = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets");
    let Some(secret) = stage::kubeconfig_secret(simulation, member, &twin) else {
        return;
    };
    let mut client = UserClient::for_home(simulation);
    client.create(&collection, &secret);
    let action = Action::Member {
        member: member.to_owned(),
        action: action.clone(),
    };
    faults::schedule_end(simulation, &action, move |simulation| {
        let mut client = UserClient::for_home(simulation);
        client.delete(&format!("{collection}/{twin}"));
        let uninstall = false;
        perform_member_action(simulation, &twin, &MemberAction::Delete { uninstall });
    });
}

fn add_elsewhere(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let collection = format!("/api/v1/namespaces/{UNTRUSTED_NAMESPACE}/secrets");
    let new_name = elsewhere_name(member);
    // A hub that uses one of them talks to a cluster with an agent, if there is one.
    let edges = ["edge-1", "edge-2", "edge-3"];
    let has_agent = |edge: &str| simulation.ip(&format!("agent-{edge}")).is_some();
    let with_agent = edges.into_iter().find(|edge| has_agent(edge));
    let cluster = match has_agent(member) {
        true => member,
        false => with_agent.unwrap_or(member),
    };
    for name in [member, &new_name] {
        if let Some(secret) = stage::kubeconfig_secret(simulation, cluster, name) {
            UserClient::for_home(simulation).create(&collection, &secret);
        }
    }
    let action = Action::Member {
        member: member.to_owned(),
        action: action.clone(),
    };
    let member = member.to_owned();
    faults::schedule_end(simulation, &action, move |simulation| {
        let mut client = UserClient::for_home(simulation);
        for name in [&member, &new_name] {
            client.delete(&format!("{collection}/{name}"));
        }
        let uninstall = false;
        perform_member_action(simulation, &new_name, &MemberAction::Delete { uninstall });
    });
}

/// Changes the Secret with a kubeconfig for a time.
fn disturb_kubeconfig(simulation: &mut Simulation, member: &str, action: &MemberAction) {
    let collection = format!("/api/v1/namespaces/{SYSTEM_NAMESPACE}/secrets");
    let path = format!("{collection}/{member}");
    let mut client = UserClient::for_home(simulation);
    let Some(secret) = client.get(&path) else {
        return;
    };
    let label = |value: &str| json!({"metadata": {"labels": {names::DISCOVERY_LABEL: value}}});
    let undo = match action {
        MemberAction::DeleteKubeconfig { .. } => {
            client.delete(&path);
            None
        }
        MemberAction::RelabelKubeconfig { .. } => {
            client.patch(&path, &label("false"));
            Some(label("true"))
        }
        _ => {
            let damaged = STANDARD.encode("not a kubeconfig");
            client.patch(&path, &json!({"data": {names::KUBECONFIG_KEY: damaged}}));
            Some(json!({"data": secret.get("data")}))
        }
    };
    let action = Action::Member {
        member: member.to_owned(),
        action: action.clone(),
    };
    faults::schedule_end(simulation, &action, move |simulation| {
        let mut client = UserClient::for_home(simulation);
        match undo {
            Some(patch) => client.patch(&path, &patch),
            None => client.create(&collection, &without_server_fields(secret)),
        };
    });
}

/// Returns the object without the fields that the API server sets.
fn without_server_fields(mut object: Value) -> Value {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        for field in [
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "generation",
            "managedFields",
        ] {
            metadata.remove(field);
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recreated_object_has_no_server_fields() {
        let old =
            json!({"metadata": {"name": "a", "uid": "u", "resourceVersion": "7", "labels": {}}});
        assert_eq!(
            without_server_fields(old),
            json!({"metadata": {"name": "a", "labels": {}}})
        );
    }
}
