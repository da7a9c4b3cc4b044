//! Selects the target member of a KryptonDeployment. Pure.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_crds::krypton_deployment::KryptonDeploymentSpec;
use krypton_types::allowed_namespaces::AllowedNamespaces;
use krypton_types::conditions::{self, State, TARGET_RESOLVED, Truth, reason};
use krypton_types::names;

use crate::discovery::named_secrets::{SecretName, SecretState};
use crate::discovery::{Origin, SourceKind};

/// The target that the spec names, in krypton-operator's order of precedence. If it names none, a member
/// with an agent and the region's name is the last choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum TargetReference {
    Secret {
        secret: SecretName,
        key: Option<String>,
        /// The spec contains only the region's name.
        is_default: bool,
    },
    Profile {
        namespace: String,
        name: String,
    },
}

pub(super) fn target_reference(
    spec: &KryptonDeploymentSpec,
    discovery_namespace: &str,
) -> TargetReference {
    let region = &spec.region;
    if let Some(profile) = &region.cluster_profile_ref {
        return TargetReference::Profile {
            namespace: profile.namespace.clone(),
            name: profile.name.clone(),
        };
    }
    let secret = |name: &str, namespace: Option<&str>| SecretName {
        namespace: namespace.unwrap_or(discovery_namespace).to_owned(),
        name: name.to_owned(),
    };
    let kubeconfig = region.kubeconfig.as_ref().and_then(|it| it.secret.as_ref());
    let key = kubeconfig
        .and_then(|secret| secret.key.clone())
        .filter(|key| !key.is_empty());
    let from_kubeconfig = kubeconfig.and_then(|reference| {
        let name = reference.name.as_deref().filter(|name| !name.is_empty())?;
        let namespace = reference.namespace.as_deref();
        Some(secret(name, namespace.filter(|it| !it.is_empty())))
    });
    let deprecated = region.kubeconfig_secret_name.as_deref();
    let deprecated = deprecated.filter(|name| !name.is_empty());
    let explicit = from_kubeconfig.or_else(|| deprecated.map(|name| secret(name, None)));
    TargetReference::Secret {
        is_default: explicit.is_none(),
        secret: explicit.unwrap_or_else(|| secret(&format!("{}-kubeconfig", region.name), None)),
        key,
    }
}

/// The fields of a member that matter to a KryptonDeployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TargetMember {
    pub(super) source: Option<SourceRef>,
    pub(super) allowed: AllowedNamespaces,
    pub(super) cluster_uid: Option<String>,
    /// Whether the hub has found another member on the same cluster, and that one acts.
    pub(super) is_duplicate: bool,
    pub(super) resolved: Option<State>,
    pub(super) connected: Option<State>,
}

impl TargetMember {
    pub(crate) fn new(object: &EdgeCluster) -> Self {
        let status = object.status.as_ref();
        let conditions = status.map_or(&[][..], |status| &status.conditions);
        Self {
            source: object.spec.source_ref.clone(),
            allowed: AllowedNamespaces::new(object.spec.allowed_namespaces.as_deref()),
            cluster_uid: status.and_then(|status| status.cluster_uid.clone()),
            is_duplicate: conditions
                .iter()
                .any(|condition| condition.reason == reason::DUPLICATE),
            resolved: conditions::find(conditions, TARGET_RESOLVED),
            connected: conditions::find(conditions, "Connected"),
        }
    }
}

/// All members, indexed by name, source and cluster UID.
#[derive(Debug)]
pub(super) struct MemberIndex<'a> {
    all: &'a BTreeMap<String, TargetMember>,
    /// The first member by name.
    by_source: BTreeMap<&'a SourceRef, &'a str>,
    /// The first acting member by name.
    by_uid: BTreeMap<&'a str, &'a str>,
}

impl<'a> MemberIndex<'a> {
    pub(super) fn new(all: &'a BTreeMap<String, TargetMember>) -> Self {
        let (mut by_source, mut by_uid) = (BTreeMap::new(), BTreeMap::new());
        for (name, member) in all {
            if let Some(source) = &member.source {
                by_source.entry(source).or_insert(name.as_str());
            }
            let uid = member.cluster_uid.as_deref();
            if let Some(uid) = uid.filter(|_| !member.is_duplicate) {
                by_uid.entry(uid).or_insert(name.as_str());
            }
        }
        Self {
            all,
            by_source,
            by_uid,
        }
    }
}

/// Sets the UIDs of members that have none recorded but an observed one.
pub(super) fn add_observed_uids(
    members: &mut BTreeMap<String, TargetMember>,
    observed_uid: impl Fn(&str) -> Option<String>,
) {
    for (name, member) in members {
        if member.cluster_uid.is_none() {
            member.cluster_uid = observed_uid(name);
        }
    }
}

/// Inputs of the selection.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelectionInputs<'a> {
    pub(super) members: &'a MemberIndex<'a>,
    pub(super) secret_states: &'a BTreeMap<SecretName, SecretState>,
    /// Namespaces whose Secrets any object may name: the hub's, and the ones that it searches for
    /// kubeconfigs.
    pub(super) open_namespaces: &'a BTreeSet<String>,
}

/// Returns the target member and the UID of its cluster, or the state for `TargetClusterResolved`.
pub(super) fn select(
    reference: &TargetReference,
    region: &str,
    namespace: &str,
    inputs: SelectionInputs<'_>,
) -> Result<(String, String), State> {
    let members = inputs.members;
    let member = match reference {
        TargetReference::Profile { namespace, name } => {
            member_by_profile(namespace, name, members)?
        }
        TargetReference::Secret {
            is_default: true, ..
        } if (members.all.get(region)).is_some_and(|target| target.source.is_none()) => {
            region.to_owned()
        }
        TargetReference::Secret { secret, .. } => member_by_secret(secret, namespace, inputs)?,
    };
    let Some(target) = members.all.get(&member) else {
        let message = format!(
            "EdgeCluster {member} does not exist; join that cluster, or name another one in spec.region"
        );
        return Err(State::new(Truth::False, reason::SOURCE_GONE, message));
    };
    // The UID is recorded with the target: the name may later belong to another cluster.
    let Some(uid) = target.cluster_uid.clone() else {
        let unresolved = target.resolved.as_ref();
        let unresolved = unresolved.filter(|state| state.truth == Truth::False);
        let cause = unresolved.map_or("waiting for the first connection", |it| &it.message);
        let reason = unresolved.map_or(reason::STARTING, |it| &it.reason);
        let truth = unresolved.map_or(Truth::Unknown, |it| it.truth);
        let message = format!("EdgeCluster {member}: {cause}");
        return Err(State::new(truth, reason, message));
    };
    let member = acting_member(&uid, &member, members).unwrap_or(member);
    let acting = members.all.get(&member);
    match acting.and_then(|target| target.allowed.refusal(&member, namespace)) {
        Some(refusal) => Err(refusal),
        None => Ok((member, uid)),
    }
}

/// Returns whether objects in the namespace may name the Secret, regardless of its label.
pub(super) fn is_trusted(
    secret: &SecretName,
    namespace: &str,
    open_namespaces: &BTreeSet<String>,
) -> bool {
    secret.namespace == namespace || open_namespaces.contains(&secret.namespace)
}

fn member_by_secret(
    secret: &SecretName,
    namespace: &str,
    inputs: SelectionInputs<'_>,
) -> Result<String, State> {
    if secret.name == names::SELF_CLUSTER {
        return Ok(names::SELF_CLUSTER.to_owned());
    }
    let secret_state = inputs.secret_states.get(secret);
    let is_open = matches!(secret_state, Some(SecretState::Present { open: true, .. }));
    // The error must not disclose whether the Secret exists.
    if secret_state.is_some() && !is_open && !is_trusted(secret, namespace, inputs.open_namespaces)
    {
        let label = names::OPEN_TO_DEPLOYMENTS_LABEL;
        let message = format!(
            "namespace {namespace} may not use Secret {secret}; use a Secret in that namespace or in the hub's, or set label {label}=true on it"
        );
        let reason = reason::SECRET_NOT_ALLOWED;
        return Err(State::new(Truth::False, reason, message));
    }
    let member = member_by_source(&secret.origin().source_ref(), inputs.members);
    let (truth, reason, message) = match (secret_state, member) {
        // The member stays the target. Its EdgeCluster reports problems.
        (Some(SecretState::Present { .. } | SecretState::Unread(_)), Some(member)) => {
            return Ok(member);
        }
        (None, _) => {
            let message = format!("looking for Secret {secret}");
            (Truth::Unknown, reason::STARTING, message)
        }
        (Some(SecretState::Absent), _) => {
            let message = format!(
                "Secret {secret} does not exist; create it with the cluster's kubeconfig, or name another in spec.region"
            );
            (Truth::False, "SecretNotFound", message)
        }
        (Some(SecretState::Unread(error)), None) => {
            let message = format!("Secret {secret} cannot be read: {error}");
            (Truth::Unknown, reason::SOURCE_UNAVAILABLE, message)
        }
        (Some(SecretState::Present { member, .. }), None) => {
            return Err(unbound_secret_state(secret, member, inputs.members));
        }
    };
    Err(State::new(truth, reason, message))
}

/// Returns why the existing Secret is not a member.
fn unbound_secret_state(secret: &SecretName, name: &str, members: &MemberIndex<'_>) -> State {
    let annotation = names::MEMBER_NAME_ANNOTATION;
    if !names::is_dns_subdomain(name) {
        let message = format!(
            "{name:?} is not a valid member name; set another name in annotation {annotation} of Secret {secret}"
        );
        return State::new(Truth::False, reason::NOT_A_NAME, message);
    }
    if members.all.contains_key(name) {
        let message = format!(
            "EdgeCluster {name} belongs to another source; set another name in annotation {annotation} of Secret {secret}"
        );
        return State::new(Truth::False, reason::NAME_TAKEN, message);
    }
    let message = format!(
        "waiting for EdgeCluster {name} of Secret {secret}; if you deleted the EdgeCluster, delete the Secret and create it again"
    );
    State::new(Truth::Unknown, reason::STARTING, message)
}

fn member_by_profile(
    namespace: &str,
    name: &str,
    members: &MemberIndex<'_>,
) -> Result<String, State> {
    let origin = Origin {
        kind: SourceKind::ClusterProfile,
        namespace: Some(namespace.to_owned()),
        name: name.to_owned(),
    };
    member_by_source(&origin.source_ref(), members).ok_or_else(|| {
        State::new(
            Truth::False,
            reason::PROFILE_NOT_FOUND,
            format!("no member found through {origin}; check that it exists and is ready, and that the hub watches it (--providers, --cluster-namespaces)"),
        )
    })
}

fn member_by_source(source: &SourceRef, members: &MemberIndex<'_>) -> Option<String> {
    members.by_source.get(source).copied().map(str::to_owned)
}

/// Returns the acting member on this cluster, preferably the one with this name.
pub(super) fn acting_member(
    uid: &str,
    preferred: &str,
    members: &MemberIndex<'_>,
) -> Option<String> {
    let is_acting =
        |member: &TargetMember| !member.is_duplicate && member.cluster_uid.as_deref() == Some(uid);
    if members.all.get(preferred).is_some_and(is_acting) {
        return Some(preferred.to_owned());
    }
    members.by_uid.get(uid).copied().map(str::to_owned)
}

#[cfg(test)]
mod tests;
