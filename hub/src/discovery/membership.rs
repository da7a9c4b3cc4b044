//! Binds sources to members. A name belongs to the source that first received it, as recorded in its
//! EdgeCluster. No other source ever inherits it. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use krypton_crds::edge_cluster::SourceRef;
use krypton_types::conditions::reason;
use krypton_types::names;

use super::member_names::MemberNames;
use super::{NamedOrigin, Origin, RunningProvider, Source, SourceKind, Unresolved};

/// Why a source is not a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The name belongs to another source.
    Taken { member: String, owner: String },
    /// The name is invalid.
    NotAName(String),
    /// The name belongs to a member without a source. Only an operator can bind a source to it.
    NotBound { member: String, origin: Origin },
    /// A user deleted its EdgeCluster.
    Dismissed { member: String },
}

impl Refusal {
    /// The member whose EdgeCluster reports the refusal.
    pub fn member(&self) -> Option<&str> {
        match self {
            Self::Taken { member, .. } | Self::NotBound { member, .. } => Some(member),
            Self::NotAName(_) | Self::Dismissed { .. } => None,
        }
    }

    pub fn reason(&self) -> &'static str {
        match self {
            Self::Taken { .. } => reason::NAME_TAKEN,
            Self::NotBound { .. } => "SourceNotBound",
            Self::NotAName(_) => reason::NOT_A_NAME,
            Self::Dismissed { .. } => "Dismissed",
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let annotation = names::MEMBER_NAME_ANNOTATION;
        match self {
            Self::Taken { member, owner } => write!(
                f,
                "the name {member} belongs to {owner}; set another name with annotation {annotation} (rename a file or its context) or a prefix with --member-prefix, or, to move the member to this source, set spec.sourceRef of EdgeCluster {member}"
            ),
            Self::NotAName(name) => write!(
                f,
                "{name:?} cannot be the name of a member; write lower-case letters, digits, '-' and '.' into the annotation {annotation} (a file: rename it or its context)"
            ),
            Self::NotBound { member, origin } => write!(
                f,
                "EdgeCluster {member} has no spec.sourceRef; if this is the same cluster, run: kubectl patch edgecluster {member} --type merge -p '{}'; otherwise, set another name in annotation {annotation}",
                serde_json::json!({ "spec": { "sourceRef": origin.source_ref() } })
            ),
            Self::Dismissed { member } => write!(
                f,
                "EdgeCluster {member} was deleted; to add the member again, remove the label of its source and set it again, or recreate the source"
            ),
        }
    }
}

/// The members with a source, and all other outcomes.
#[derive(Clone, Debug, Default)]
pub struct Membership {
    pub members: BTreeMap<String, Arc<Source>>,
    pub refused: BTreeMap<Origin, Refusal>,
    /// Bound to a source that its provider cannot list yet: neither present nor gone.
    pub unseen: BTreeMap<String, Unresolved>,
    /// Bound to a source that doesn't exist.
    pub gone: BTreeMap<String, Unresolved>,
    /// Members whose provider fails. They keep the state of its last list.
    pub troubled: BTreeMap<String, Unresolved>,
    /// Whether names wait for providers that have not listed yet, because one of them may know an older
    /// source.
    pub waiting: bool,
}

/// The earlier decisions, and whether the hub has just started.
#[derive(Clone, Copy, Debug)]
pub struct BindingInput<'a> {
    /// The existing EdgeClusters, each with its source.
    pub bound: &'a BTreeMap<String, Option<SourceRef>>,
    /// Dismissed sources, which become members only after a user labels them again.
    pub dismissed: &'a BTreeSet<NamedOrigin>,
    /// Whether to wait for providers that have not listed yet.
    pub in_startup_grace: bool,
}

/// Decides for all sources together.
pub fn bind_sources(providers: &[&RunningProvider], input: BindingInput<'_>) -> Membership {
    let mut membership = Membership::default();
    let all_listed = providers.iter().all(|running| {
        let listing = &running.listing;
        listing.sources.is_some() || listing.trouble.is_some() || listing.closed
    });
    for (name, sources) in group_by_name(providers, input, &mut membership.refused) {
        bind(&name, sources, input, all_listed, &mut membership);
    }
    for (name, source) in input.bound {
        if let Some(source) = source.as_ref().filter(|source| source.kind != SELF_CLUSTER) {
            record_trouble(name, source, providers, &mut membership);
        }
    }
    membership
}

/// Groups the sources by name. Refuses sources with an invalid name.
fn group_by_name<'a>(
    providers: &[&'a RunningProvider],
    input: BindingInput<'_>,
    refused: &mut BTreeMap<Origin, Refusal>,
) -> BTreeMap<String, Vec<&'a Arc<Source>>> {
    let member_names = MemberNames::new(input.bound, input.dismissed);
    let mut by_name: BTreeMap<String, Vec<&Arc<Source>>> = BTreeMap::new();
    // Two providers can find one Secret, by its label and by a reference: the first provider takes
    // precedence.
    let mut seen: BTreeSet<&Origin> = BTreeSet::new();
    for running in providers {
        let sources = running.listing.sources.as_deref().into_iter();
        for source in sources.flat_map(BTreeMap::values) {
            if !seen.insert(&source.origin) {
                continue;
            }
            let name = member_names.name(running, source);
            if names::is_dns_subdomain(&name) {
                by_name.entry(name).or_default().push(source);
            } else {
                refused.insert(source.origin.clone(), Refusal::NotAName(name));
            }
        }
    }
    by_name
}

/// Decides which source gets the name that all of `sources` request.
fn bind(
    name: &str,
    mut sources: Vec<&Arc<Source>>,
    input: BindingInput<'_>,
    all_listed: bool,
    membership: &mut Membership,
) {
    // A source without a creation time, such as a file, counts as the youngest.
    sources.sort_by_key(|source| (source.since.is_none(), source.since, source.origin.clone()));
    let dismissed = |source: &Source| {
        let entry = (name.to_owned(), source.origin.clone());
        input.dismissed.contains(&entry)
    };
    let (winner, owner) = match input.bound.get(name) {
        _ if name == names::SELF_CLUSTER => (None, "the home cluster".to_owned()),
        Some(Some(bound)) => {
            let is_bound = |source: &&&Arc<Source>| source.origin.source_ref() == *bound;
            (sources.iter().find(is_bound).copied(), describe(bound))
        }
        // Only an operator binds a source to a member: an attacker could have created the source.
        Some(None) => {
            let refused = sources.into_iter().map(|source| {
                let (member, origin) = (name.to_owned(), source.origin.clone());
                (origin.clone(), Refusal::NotBound { member, origin })
            });
            membership.refused.extend(refused);
            return;
        }
        None => {
            let first = sources.iter().find(|source| !dismissed(source)).copied();
            let wait = input.in_startup_grace && !all_listed;
            if wait || first.is_some_and(|first| first.pending().is_some()) {
                membership.waiting = true;
                return;
            }
            let owner = first.map(|first| first.origin.to_string());
            (first, owner.unwrap_or_default())
        }
    };
    for source in sources {
        let (member, origin) = (name.to_owned(), source.origin.clone());
        if winner.is_none_or(|winner| winner.origin != origin) {
            let owner = owner.clone();
            let refusal = match dismissed(source) {
                true => Refusal::Dismissed { member },
                false => Refusal::Taken { member, owner },
            };
            membership.refused.insert(origin, refusal);
        } else if let Some(problem) = source.pending() {
            membership.unseen.insert(member, problem.clone());
        } else {
            membership.members.insert(member, Arc::clone(source));
        }
    }
}

/// Records why the source of a member cannot be read, is not listed yet, or is gone.
fn record_trouble(
    name: &str,
    source: &SourceRef,
    providers: &[&RunningProvider],
    membership: &mut Membership,
) {
    let origin = Origin::from_source_ref(source);
    let is_member = membership.members.contains_key(name);
    let listing = origin.as_ref().and_then(|origin| {
        let covering = || {
            providers
                .iter()
                .filter(|running| running.provider.covers(origin))
        };
        // A source is gone once all providers that cover it have listed. If one lists it, that provider
        // decides.
        let decides = |running: &&&RunningProvider| match &running.listing.sources {
            Some(sources) => is_member && sources.contains_key(origin),
            None => !is_member,
        };
        let deciding = covering().find(decides).or_else(|| covering().next());
        deciding.map(|running| &running.listing)
    });
    match (listing, origin) {
        (Some(listing), Some(origin)) if is_member => {
            let trouble = trouble(&origin, listing.trouble.as_deref(), listing.closed);
            let trouble = trouble.map(|trouble| (name.to_owned(), trouble));
            membership.troubled.extend(trouble);
        }
        (Some(listing), Some(origin)) if listing.sources.is_none() => {
            let trouble = trouble(&origin, listing.trouble.as_deref(), listing.closed);
            let starting = || Unresolved::new(reason::STARTING, format!("looking for {origin}"));
            let unseen = trouble.unwrap_or_else(starting);
            membership.unseen.insert(name.to_owned(), unseen);
        }
        _ if membership.unseen.contains_key(name) => {}
        (listing, origin) => {
            let unread = origin.as_ref().and_then(|origin| {
                let mut listings = providers.iter().map(|running| &running.listing);
                listings.find_map(|listing| listing.unread_file(origin))
            });
            if let Some(problem) = unread {
                membership.unseen.insert(name.to_owned(), problem.clone());
            } else {
                let gone = gone(source, origin.as_ref(), listing.is_some());
                membership.gone.insert(name.to_owned(), gone);
            }
        }
    }
}

/// `spec.sourceRef.kind` of the home cluster as a member.
pub const SELF_CLUSTER: &str = "SelfCluster";

fn describe(source: &SourceRef) -> String {
    Origin::from_source_ref(source).map_or_else(
        || format!("a source of the unknown kind {}", source.kind),
        |origin| origin.to_string(),
    )
}

/// The reasons are the same as in the Knative operator for a ClusterProfile.
fn trouble(origin: &Origin, trouble: Option<&str>, closed: bool) -> Option<Unresolved> {
    if closed {
        let message =
            format!("the discovery of {origin} has ended; see the hub's log, and restart the hub");
        return Some(Unresolved::new(reason::PROVIDER_CLOSED, message));
    }
    trouble.map(|problem| Unresolved {
        reason: if origin.kind == SourceKind::ClusterProfile {
            reason::PROFILE_UNAVAILABLE
        } else {
            reason::SOURCE_UNAVAILABLE
        },
        message: format!("{origin} cannot be read now; using its last state: {problem}"),
    })
}

fn gone(source: &SourceRef, origin: Option<&Origin>, is_watched: bool) -> Unresolved {
    let name = describe(source);
    if !is_watched {
        let message = format!(
            "the hub does not watch {name}, and no KryptonDeployment names it; check --providers, --kubeconfig-namespaces, --cluster-namespaces and --kubeconfig-paths. Its releases stay"
        );
        return Unresolved::new(reason::PROVIDER_NOT_CONFIGURED, message);
    }
    let kind = origin.map(|origin| origin.kind);
    let reason = match kind {
        Some(SourceKind::ClusterProfile) => reason::PROFILE_NOT_FOUND,
        _ => reason::SOURCE_GONE,
    };
    let message = match kind {
        Some(SourceKind::Secret) => format!(
            "{name} is gone, or has no label and no KryptonDeployment names it, and the member's releases stay; restore it, or delete the EdgeCluster"
        ),
        _ => format!(
            "{name} is gone and the member's releases stay; restore it, or delete the EdgeCluster"
        ),
    };
    Unresolved::new(reason, message)
}

#[cfg(test)]
mod tests;
