//! Collects the sources of an explanation: each request has its own deadline and records why it failed.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::events::v1::Event;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::tenant::Tenant;
use krypton_runtime::access::reason_of;
use krypton_runtime::call::{ApiError, call};
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::conditions::{self, Readiness};
use krypton_types::error_chain::chain;
use krypton_types::fleet_tenants::FleetTenant;
use krypton_types::names::HUB_LEASE;
use krypton_types::tenant::{TenantKey, TenantReport};
use kube::api::ListParams;

use crate::error::KubectlError;
use crate::fleet_tenants::{self, Selection};
use crate::home::Connection;
use crate::render::one_line;

/// Maximum number of members with separate lines.
pub(super) const MOST_MEMBERS: usize = 10;
const MOST_EVENTS: u32 = 500;

/// Result of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Answer<T> {
    Found(T),
    /// The object or its kind does not exist.
    None,
    /// The missing verb and its resource.
    NotPermitted(String),
    Failed(String),
}

impl<T> Answer<T> {
    /// Returns why the request failed, or `None` if the API server answered it.
    pub(crate) fn failure(&self) -> Option<String> {
        match self {
            Self::Found(_) | Self::None => None,
            Self::NotPermitted(right) => Some(format!("you may not {right}")),
            Self::Failed(why) => Some(why.clone()),
        }
    }
}

/// All sources of an explanation.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub(super) tenant: Answer<Tenant>,
    /// The member's report of a Tenant that the home cluster does not have.
    pub(super) reported: Answer<TenantReport>,
    /// Leader election Lease of the hubs.
    pub(super) lead: Answer<Lease>,
    /// Lease of this cluster if it is an edge cluster.
    pub(super) acts: Answer<Lease>,
    /// Namespaces searched for the hubs' Lease.
    pub(super) hub_namespaces: Vec<String>,
    /// Members to explain.
    pub(super) members: BTreeMap<String, Answer<EdgeCluster>>,
    /// Events of the Tenant, newest last.
    pub(super) events: Answer<Vec<PastEvent>>,
}

/// One event, or a series of equal ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PastEvent {
    pub(super) at: Timestamp,
    pub(super) warning: bool,
    pub(super) reason: String,
    pub(super) message: String,
}

/// Collects all sources.
///
/// # Errors
/// Fails if the Tenant does not exist and no member is named, the cluster does not respond, or it rejects the
/// credentials.
pub(super) async fn gather(
    key: &TenantKey,
    on: Option<&str>,
    (hub_namespace, debug_address): (Option<&str>, Option<SocketAddr>),
    home: &Connection,
) -> Result<Sources, KubectlError> {
    let (tenant, acts, (lead, hub_namespaces), events) = tokio::join!(
        Box::pin(tenant(key, home)),
        acts(home),
        lead(hub_namespace, home),
        events(key, home),
    );
    let tenant = tenant?;
    if tenant == Answer::None && on.is_none() {
        return Err(KubectlError::NotFound(format!(
            "Tenant {key} not found on the cluster {:?}; if it exists only on a member, pass that cluster's --context, or --on MEMBER for the state that the home cluster has recorded",
            home.context
        )));
    }
    let reported = match (&tenant, on) {
        (Answer::None, Some(member)) => {
            let one = Selection::one(member, key);
            let reading = fleet_tenants::read(home, hub_namespace, debug_address, &one);
            reported(Box::pin(reading).await)
        }
        _ => Answer::None,
    };
    let names = members_to_tell(&tenant, on);
    let members = home.all::<EdgeCluster>();
    let looking = names.into_iter().map(async |name| {
        let found = ask("get edgeclusters", members.api.get(&name)).await;
        (name, found)
    });
    let members = futures::future::join_all(looking).await;
    Ok(Sources {
        tenant,
        reported,
        lead,
        acts,
        hub_namespaces,
        members: members.into_iter().collect(),
        events,
    })
}

/// Returns the members that the Tenant is on or names, limited to those in the worst state.
pub(super) fn members_to_tell(tenant: &Answer<Tenant>, on: Option<&str>) -> Vec<String> {
    if let Some(member) = on {
        return vec![member.to_owned()];
    }
    let Answer::Found(tenant) = tenant else {
        return Vec::new();
    };
    let status = tenant.status.clone().unwrap_or_default();
    let mut clusters: Vec<_> = conditions::clusters(&status.conditions)
        .into_iter()
        .map(|(name, state)| (Readiness::of(&state, false), name))
        .collect();
    clusters.sort();
    let mut names: Vec<String> = clusters.into_iter().map(|(_, name)| name).collect();
    names.truncate(MOST_MEMBERS);
    if let Some(named) = tenant.names_member()
        && !names.iter().any(|name| name == named)
    {
        names.push(named.to_owned());
    }
    names
}

fn reported(found: Result<Vec<FleetTenant>, KubectlError>) -> Answer<TenantReport> {
    match found {
        Ok(found) => {
            let first = found.into_iter().next();
            first.map_or(Answer::None, |tenant| Answer::Found(tenant.report))
        }
        Err(error) => Answer::Failed(one_line(&chain(&error))),
    }
}

async fn tenant(key: &TenantKey, home: &Connection) -> Result<Answer<Tenant>, KubectlError> {
    let tenants = home.namespaced::<Tenant>(&key.namespace);
    match tenants.find(&key.name).await {
        Ok(found) => Ok(found.map_or(Answer::None, Answer::Found)),
        Err(error) if error.code() == Some(403) => {
            Ok(Answer::NotPermitted("get tenants".to_owned()))
        }
        Err(error) => Err(error),
    }
}

/// Returns the first Lease found, otherwise the most relevant failure.
pub(crate) async fn lead(named: Option<&str>, home: &Connection) -> (Answer<Lease>, Vec<String>) {
    let namespaces = home.hub_namespaces(named);
    let mut answer = Answer::None;
    for namespace in &namespaces {
        match lease(home, namespace, HUB_LEASE).await {
            Answer::None => {}
            found @ Answer::Found(_) => return (found, vec![namespace.clone()]),
            other => answer = other,
        }
    }
    (answer, namespaces)
}

async fn acts(cluster: &Connection) -> Answer<Lease> {
    lease(cluster, SYSTEM_NAMESPACE, LEASE_NAME).await
}

async fn lease(cluster: &Connection, namespace: &str, name: &str) -> Answer<Lease> {
    let leases = cluster.namespaced::<Lease>(namespace);
    let right = format!("get leases in the namespace {namespace}");
    ask(&right, leases.api.get(name)).await
}

async fn events(key: &TenantKey, home: &Connection) -> Answer<Vec<PastEvent>> {
    let events = home.namespaced::<Event>(&key.namespace);
    let of = format!("regarding.kind=Tenant,regarding.name={}", key.name);
    let params = ListParams::default().fields(&of).limit(MOST_EVENTS);
    ask("list events", async {
        let list = events.api.list(&params).await?;
        let mut past: Vec<PastEvent> = list.items.into_iter().filter_map(read).collect();
        past.sort_by_key(|event| event.at);
        Ok(past)
    })
    .await
}

fn read(event: Event) -> Option<PastEvent> {
    let series = event.series.map(|series| series.last_observed_time.0);
    let at = series
        .or(event.event_time.map(|time| time.0))
        .or(event.deprecated_last_timestamp.map(|time| time.0))
        .or(event.metadata.creation_timestamp.map(|time| time.0))?;
    Some(PastEvent {
        at,
        warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.unwrap_or_default(),
        message: event.note.unwrap_or_default(),
    })
}

/// Runs a request that needs the right `right`.
pub(crate) async fn ask<T>(
    right: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Answer<T> {
    match call(right.to_owned(), request).await {
        Ok(found) => Answer::Found(found),
        Err(error) => match (error.code(), error) {
            (Some(404), _) => Answer::None,
            (Some(401 | 403), _) => Answer::NotPermitted(right.to_owned()),
            (_, ApiError::Failed { source, .. }) => Answer::Failed(one_line(&reason_of(&source))),
            (_, ApiError::Timeout { deadline, .. }) => {
                Answer::Failed(format!("no response within {} s", deadline.as_secs()))
            }
        },
    }
}
