//! Selects the target member of a KryptonDeployment. Pure.

use std::collections::{BTreeMap, BTreeSet};

use krypton_crds::edge_cluster::{EdgeCluster, SourceRef};
use krypton_crds::krypton_deployment::KryptonDeploymentSpec;
use krypton_types::allowed_namespaces::Allowed;
use krypton_types::conditions::{self, State, TARGET_RESOLVED, Truth, reason};
use krypton_types::names;

use crate::discovery::named_secrets::{Finding, SecretName};
use crate::discovery::{Kind, Origin};

/// The target that the spec names, in krypton-operator's order of precedence. If it names none, a member
/// with an agent and the region's name is the last choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Named {
    Secret {
        secret: SecretName,
        key: Option<String>,
        /// The spec contains only the region's name.
        by_default: bool,
    },
    Profile {
        namespace: String,
        name: String,
    },
}

pub(super) fn named(spec: &KryptonDeploymentSpec, discovery_namespace: &str) -> Named {
    let region = &spec.region;
    if let Some(profile) = &region.cluster_profile_ref {
        return Named::Profile {
            namespace: profile.namespace.clone(),
            name: profile.name.clone(),
        };
    }
    let secret = |name: &str, namespace: Option<&str>| SecretName {
        namespace: namespace.unwrap_or(discovery_namespace).to_owned(),
        name: name.to_owned(),
    };
    let given = region.kubeconfig.as_ref().and_then(|it| it.secret.as_ref());
    let key = given
        .and_then(|given| given.key.clone())
        .filter(|key| !key.is_empty());
    let by_secret = given.and_then(|given| {
        let name = given.name.as_deref().filter(|name| !name.is_empty())?;
        Some(secret(
            name,
            given.namespace.as_deref().filter(|it| !it.is_empty()),
        ))
    });
    let deprecated = region.kubeconfig_secret_name.as_deref();
    let deprecated = deprecated.filter(|name| !name.is_empty());
    let named = by_secret.or_else(|| deprecated.map(|name| secret(name, None)));
    Named::Secret {
        by_default: named.is_none(),
        secret: named.unwrap_or_else(|| secret(&format!("{}-kubeconfig", region.name), None)),
        key,
    }
}

/// The fields of a member that matter to a KryptonDeployment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cluster {
    pub(super) source: Option<SourceRef>,
    pub(super) allowed: Allowed,
    pub(super) cluster_uid: Option<String>,
    /// Whether the hub has found another member on the same cluster, and that one acts.
    pub(super) duplicate: bool,
    pub(super) resolved: Option<State>,
    pub(super) connected: Option<State>,
}

impl Cluster {
    pub(crate) fn of(object: &EdgeCluster) -> Self {
        let status = object.status.as_ref();
        let conditions = status.map_or(&[][..], |status| &status.conditions);
        Self {
            source: object.spec.source_ref.clone(),
            allowed: Allowed::new(object.spec.allowed_namespaces.as_deref()),
            cluster_uid: status.and_then(|status| status.cluster_uid.clone()),
            duplicate: conditions
                .iter()
                .any(|condition| condition.reason == reason::DUPLICATE),
            resolved: conditions::find(conditions, TARGET_RESOLVED),
            connected: conditions::find(conditions, "Connected"),
        }
    }
}

/// All members, indexed by name, source and cluster UID.
#[derive(Clone, Debug, Default)]
pub(super) struct Clusters {
    all: BTreeMap<String, Cluster>,
    by_source: BTreeMap<SourceKey, BTreeSet<String>>,
    by_uid: BTreeMap<String, BTreeSet<String>>,
    /// Members without a known UID.
    unreached: BTreeSet<String>,
}

type SourceKey = (String, Option<String>, Option<String>);

fn source_key(source: &SourceRef) -> SourceKey {
    let SourceRef {
        kind,
        namespace,
        name,
    } = source.clone();
    (kind, namespace, name)
}

impl Clusters {
    pub(super) fn get(&self, name: &str) -> Option<&Cluster> {
        self.all.get(name)
    }

    /// Stores a member. Returns its previous state.
    pub(super) fn insert(&mut self, name: String, cluster: Cluster) -> Option<Cluster> {
        let before = self.remove(&name);
        if let Some(source) = &cluster.source {
            let of_source = self.by_source.entry(source_key(source)).or_default();
            of_source.insert(name.clone());
        }
        match &cluster.cluster_uid {
            Some(uid) => self
                .by_uid
                .entry(uid.clone())
                .or_default()
                .insert(name.clone()),
            None => self.unreached.insert(name.clone()),
        };
        self.all.insert(name, cluster);
        before
    }

    pub(super) fn remove(&mut self, name: &str) -> Option<Cluster> {
        let cluster = self.all.remove(name)?;
        if let Some(source) = &cluster.source {
            take_out(&mut self.by_source, &source_key(source), name);
        }
        match &cluster.cluster_uid {
            Some(uid) => take_out(&mut self.by_uid, uid, name),
            None => drop(self.unreached.remove(name)),
        }
        Some(cluster)
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let names = self.all.keys().filter(|name| !keep(name));
        let gone: Vec<String> = names.cloned().collect();
        for name in gone {
            self.remove(&name);
        }
    }

    /// Adds the UID from `found` to members without one.
    pub(super) fn learn(&mut self, found: impl Fn(&str) -> Option<String>) {
        let unreached = self.unreached.iter();
        let news = unreached.filter_map(|name| Some((name.clone(), found(name)?)));
        for (name, uid) in news.collect::<Vec<_>>() {
            if let Some(mut cluster) = self.all.get(&name).cloned() {
                cluster.cluster_uid = Some(uid);
                self.insert(name, cluster);
            }
        }
    }

    /// Returns the first member by name.
    fn of_source(&self, source: &SourceRef) -> Option<&String> {
        self.by_source.get(&source_key(source))?.first()
    }

    fn of_uid(&self, uid: &str) -> impl Iterator<Item = (&String, &Cluster)> {
        let names = self.by_uid.get(uid).into_iter().flatten();
        names.filter_map(|name| self.all.get_key_value(name))
    }
}

fn take_out<K: Ord>(index: &mut BTreeMap<K, BTreeSet<String>>, key: &K, name: &str) {
    if let Some(names) = index.get_mut(key) {
        names.remove(name);
        if names.is_empty() {
            index.remove(key);
        }
    }
}

/// Inputs of the selection.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight<'a> {
    pub(super) clusters: &'a Clusters,
    pub(super) findings: &'a BTreeMap<SecretName, Finding>,
    /// Namespaces whose Secrets any object may name: the hub's, and the ones that it searches for
    /// kubeconfigs.
    pub(super) open_namespaces: &'a BTreeSet<String>,
}

/// Returns the target member and the UID of its cluster, or the state for `TargetClusterResolved`.
pub(super) fn select(
    named: &Named,
    region: &str,
    from: &str,
    sight: Sight<'_>,
) -> Result<(String, String), State> {
    let member = match named {
        Named::Profile { namespace, name } => of_profile(namespace, name, sight.clusters)?,
        Named::Secret {
            by_default: true, ..
        } if sight
            .clusters
            .get(region)
            .is_some_and(|cluster| cluster.source.is_none()) =>
        {
            region.to_owned()
        }
        Named::Secret { secret, .. } => of_secret(secret, from, sight)?,
    };
    let Some(cluster) = sight.clusters.get(&member) else {
        let message = format!("EdgeCluster {member} does not exist");
        return Err(State::new(Truth::False, reason::SOURCE_GONE, message));
    };
    // The UID is recorded with the target: the name may later belong to another cluster.
    let Some(uid) = cluster.cluster_uid.clone() else {
        let wrong = cluster.resolved.as_ref();
        let wrong = wrong.filter(|state| state.truth == Truth::False);
        let why = wrong.map_or("it is reached for the first time", |it| &it.message);
        let reason = wrong.map_or(reason::STARTING, |it| &it.reason);
        let truth = wrong.map_or(Truth::Unknown, |it| it.truth);
        let message = format!("EdgeCluster {member}: {why}");
        return Err(State::new(truth, reason, message));
    };
    let member = acting(&uid, &member, sight.clusters).unwrap_or(member);
    let allowed = sight.clusters.get(&member).map(|cluster| &cluster.allowed);
    match allowed.and_then(|allowed| allowed.refusal(&member, from)) {
        Some(refusal) => Err(refusal),
        None => Ok((member, uid)),
    }
}

/// Returns whether objects in the namespace may name the Secret, regardless of its label.
pub(super) fn trusted(secret: &SecretName, from: &str, open_namespaces: &BTreeSet<String>) -> bool {
    secret.namespace == from || open_namespaces.contains(&secret.namespace)
}

fn of_secret(secret: &SecretName, from: &str, sight: Sight<'_>) -> Result<String, State> {
    if secret.name == names::SELF_CLUSTER {
        return Ok(names::SELF_CLUSTER.to_owned());
    }
    let finding = sight.findings.get(secret);
    let open = matches!(finding, Some(Finding::There { open: true, .. }));
    // The error must not disclose whether the Secret exists.
    if finding.is_some() && !open && !trusted(secret, from, sight.open_namespaces) {
        let label = names::OPEN_TO_DEPLOYMENTS_LABEL;
        return Err(State::new(
            Truth::False,
            "SecretNotAllowed",
            format!(
                "namespace {from} may not use Secret {secret}; use a Secret in that namespace or in the hub's, or set label {label}=true on it"
            ),
        ));
    }
    let member = member_of(&secret.origin().source_ref(), sight.clusters);
    match (finding, member) {
        // The member stays the target. Its EdgeCluster reports problems.
        (Some(Finding::There { .. } | Finding::Unread(_)), Some(member)) => Ok(member),
        (None, _) => Err(State::new(
            Truth::Unknown,
            reason::STARTING,
            format!("looking for Secret {secret}"),
        )),
        (Some(Finding::NotThere), _) => Err(State::new(
            Truth::False,
            "SecretNotFound",
            format!(
                "Secret {secret} does not exist; create it with the cluster's kubeconfig, or name another in spec.region"
            ),
        )),
        (Some(Finding::Unread(why)), None) => Err(State::new(
            Truth::Unknown,
            reason::SOURCE_UNAVAILABLE,
            format!("Secret {secret} cannot be read: {why}"),
        )),
        (Some(Finding::There { member, .. }), None) => Err(unbound(secret, member, sight.clusters)),
    }
}

/// Returns why the existing Secret is not a member.
fn unbound(secret: &SecretName, wanted: &str, clusters: &Clusters) -> State {
    let annotation = names::MEMBER_NAME_ANNOTATION;
    if !names::is_dns_subdomain(wanted) {
        let message = format!(
            "{wanted:?} is not a valid member name; set another name in annotation {annotation} of Secret {secret}"
        );
        return State::new(Truth::False, "NotAName", message);
    }
    match clusters.get(wanted) {
        Some(_) => State::new(
            Truth::False,
            "NameTaken",
            format!(
                "EdgeCluster {wanted} belongs to another source; set another name in annotation {annotation} of Secret {secret}"
            ),
        ),
        None => State::new(
            Truth::Unknown,
            reason::STARTING,
            format!(
                "waiting for EdgeCluster {wanted} of Secret {secret}; if you deleted the EdgeCluster, delete the Secret and create it again"
            ),
        ),
    }
}

fn of_profile(namespace: &str, name: &str, clusters: &Clusters) -> Result<String, State> {
    let origin = Origin {
        kind: Kind::ClusterProfile,
        namespace: Some(namespace.to_owned()),
        name: name.to_owned(),
    };
    member_of(&origin.source_ref(), clusters).ok_or_else(|| {
        State::new(
            Truth::False,
            reason::PROFILE_NOT_FOUND,
            format!("no member found through {origin}; check that it exists and is ready, and that the hub watches it (--providers, --cluster-namespaces)"),
        )
    })
}

fn member_of(source: &SourceRef, clusters: &Clusters) -> Option<String> {
    clusters.of_source(source).cloned()
}

/// Returns the acting member on this cluster, preferably the one with this name.
pub(super) fn acting(uid: &str, name: &str, clusters: &Clusters) -> Option<String> {
    let acts =
        |cluster: &Cluster| !cluster.duplicate && cluster.cluster_uid.as_deref() == Some(uid);
    if clusters.get(name).is_some_and(acts) {
        return Some(name.to_owned());
    }
    let other = clusters.of_uid(uid).find(|(_, cluster)| acts(cluster));
    other.map(|(name, _)| name.clone())
}

#[cfg(test)]
mod tests;
