//! Collects the sources of an explanation: each request has its own deadline and records why it failed.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::events::v1::Event;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::krypton_deployment::KryptonDeployment;
use krypton_crds::tenant::Tenant;
use krypton_runtime::access::api_error_message;
use krypton_runtime::call::{ApiError, CALL, call_within};
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::conditions::{self, Readiness};
use krypton_types::error_chain::chain;
use krypton_types::names::HUB_LEASE;
use krypton_types::tenant::{TenantKey, TenantReport};
use kube::api::ListParams;

use crate::error::KubectlError;
use crate::fleet_tenants::{self, TenantFilter};
use crate::home::Connection;
use crate::render::one_line;

/// Maximum number of members with separate lines.
pub(super) const MAX_MEMBERS: usize = 10;
const MAX_EVENTS: u32 = 500;
/// Namespace of the events on objects without a namespace.
const CLUSTER_EVENTS: &str = "default";

/// Result of a request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Lookup<T> {
    Found(T),
    /// The object or its kind does not exist.
    NotFound,
    /// The missing verb and its resource.
    NotPermitted(String),
    Failed(String),
}

impl<T> Lookup<T> {
    /// Returns why the request failed, or `None` if the API server answered it.
    pub(crate) fn failure(&self) -> Option<String> {
        match self {
            Self::Found(_) | Self::NotFound => None,
            Self::NotPermitted(permission) => Some(format!("you may not {permission}")),
            Self::Failed(reason) => Some(reason.clone()),
        }
    }
}

/// All sources of an explanation.
#[derive(Clone, Debug)]
pub(super) struct ExplanationSources {
    pub(super) tenant: Lookup<Tenant>,
    /// The member's report of a Tenant that the home cluster does not have.
    pub(super) member_report: Lookup<TenantReport>,
    /// Leader election Lease of the hubs.
    pub(super) leader_lease: Lookup<Lease>,
    /// Lease of this cluster if it is an edge cluster.
    pub(super) edge_lease: Lookup<Lease>,
    /// Namespaces searched for the hubs' Lease.
    pub(super) hub_namespaces: Vec<String>,
    /// Members to explain.
    pub(super) members: BTreeMap<String, Lookup<EdgeCluster>>,
    /// Events of the Tenant, newest last.
    pub(super) events: Lookup<Vec<PastEvent>>,
}

/// The sources of an explanation of an object that only the home cluster has.
#[derive(Clone, Debug)]
pub(super) struct ObjectSources<K> {
    pub(super) object: K,
    /// Leader election Lease of the hubs.
    pub(super) leader_lease: Lookup<Lease>,
    /// Namespaces searched for the hubs' Lease.
    pub(super) hub_namespaces: Vec<String>,
    /// Members that have the object's release.
    pub(super) members: BTreeMap<String, Lookup<EdgeCluster>>,
    /// Events of the object, newest last.
    pub(super) events: Lookup<Vec<PastEvent>>,
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
pub(super) async fn collect(
    key: &TenantKey,
    member: Option<&str>,
    debug_address: Option<SocketAddr>,
    home: &Connection,
) -> Result<ExplanationSources, KubectlError> {
    let (tenant, edge_lease, (leader_lease, hub_namespaces), events) = tokio::join!(
        Box::pin(find_tenant(key, home)),
        find_lease(home, SYSTEM_NAMESPACE, LEASE_NAME),
        leader_lease(home),
        events_of("Tenant", &key.namespace, &key.name, home),
    );
    let tenant = tenant?;
    if tenant == Lookup::NotFound && member.is_none() {
        return Err(KubectlError::NotFound(format!(
            "Tenant {key} not found on the cluster {:?}; if it exists only on a member, pass that cluster's --context, or --on MEMBER for the state that the home cluster has recorded",
            home.context
        )));
    }
    let member_report = match (&tenant, member) {
        (Lookup::NotFound, Some(member)) => {
            let filter = TenantFilter::single(member, key);
            let reading = fleet_tenants::read(home, debug_address, &filter);
            match Box::pin(reading).await {
                Ok(read) => {
                    let first = read.tenants.into_iter().next();
                    first.map_or(Lookup::NotFound, |tenant| Lookup::Found(tenant.report))
                }
                Err(error) => Lookup::Failed(one_line(&chain(&error))),
            }
        }
        _ => Lookup::NotFound,
    };
    let members = find_members(members_to_explain(&tenant, member), home).await;
    Ok(ExplanationSources {
        tenant,
        member_report,
        leader_lease,
        edge_lease,
        hub_namespaces,
        members,
        events,
    })
}

/// Collects the sources for a KryptonDeployment. Fails if it cannot be read.
pub(super) async fn collect_deployment(
    namespace: &str,
    name: &str,
    home: &Connection,
) -> Result<ObjectSources<KryptonDeployment>, KubectlError> {
    let objects = home.namespaced::<KryptonDeployment>(namespace);
    let object = Box::pin(objects.get(name)).await?;
    let status = object.status.iter();
    let placements = status.flat_map(|status| status.placements.iter().flatten());
    let names = placements.map(|placement| placement.cluster.clone());
    let ((leader_lease, hub_namespaces), members, events) = tokio::join!(
        leader_lease(home),
        find_members(names.collect(), home),
        events_of("KryptonDeployment", namespace, name, home),
    );
    Ok(ObjectSources {
        object,
        leader_lease,
        hub_namespaces,
        members,
        events,
    })
}

/// Collects the sources for an EdgeCluster. Fails if it cannot be read.
pub(super) async fn collect_cluster(
    name: &str,
    home: &Connection,
) -> Result<ObjectSources<EdgeCluster>, KubectlError> {
    let objects = home.all::<EdgeCluster>();
    let object = Box::pin(objects.get(name)).await?;
    let ((leader_lease, hub_namespaces), events) = tokio::join!(
        leader_lease(home),
        events_of("EdgeCluster", CLUSTER_EVENTS, name, home),
    );
    Ok(ObjectSources {
        object,
        leader_lease,
        hub_namespaces,
        members: BTreeMap::new(),
        events,
    })
}

async fn find_members(
    names: Vec<String>,
    home: &Connection,
) -> BTreeMap<String, Lookup<EdgeCluster>> {
    let members = home.all::<EdgeCluster>();
    let lookups = names.into_iter().map(async |name| {
        let cluster = lookup(home, "get edgeclusters", members.api.get(&name)).await;
        (name, cluster)
    });
    let members = futures::future::join_all(lookups).await;
    members.into_iter().collect()
}

/// Returns the members that the Tenant is on or names, limited to those in the worst state.
pub(super) fn members_to_explain(tenant: &Lookup<Tenant>, member: Option<&str>) -> Vec<String> {
    if let Some(member) = member {
        return vec![member.to_owned()];
    }
    let Lookup::Found(tenant) = tenant else {
        return Vec::new();
    };
    let status = tenant.status.clone().unwrap_or_default();
    let mut clusters: Vec<_> = conditions::clusters(&status.conditions)
        .into_iter()
        .map(|(name, state)| (Readiness::from_state(&state, false), name))
        .collect();
    clusters.sort();
    let mut names: Vec<String> = clusters.into_iter().map(|(_, name)| name).collect();
    names.truncate(MAX_MEMBERS);
    if let Some(referenced) = tenant.referenced_member()
        && !names.iter().any(|name| name == referenced)
    {
        names.push(referenced.to_owned());
    }
    names
}

async fn find_tenant(key: &TenantKey, home: &Connection) -> Result<Lookup<Tenant>, KubectlError> {
    let tenants = home.namespaced::<Tenant>(&key.namespace);
    match tenants.find(&key.name).await {
        Ok(tenant) => Ok(tenant.map_or(Lookup::NotFound, Lookup::Found)),
        Err(error) if error.code() == Some(403) => {
            Ok(Lookup::NotPermitted("get tenants".to_owned()))
        }
        Err(error) => Err(error),
    }
}

/// Returns the first Lease found, otherwise the most relevant failure.
pub(crate) async fn leader_lease(home: &Connection) -> (Lookup<Lease>, Vec<String>) {
    let namespaces = home.hub_namespaces();
    let mut last_failure = Lookup::NotFound;
    for namespace in &namespaces {
        match find_lease(home, namespace, HUB_LEASE).await {
            Lookup::NotFound => {}
            found @ Lookup::Found(_) => return (found, vec![namespace.clone()]),
            failure => last_failure = failure,
        }
    }
    (last_failure, namespaces)
}

async fn find_lease(cluster: &Connection, namespace: &str, name: &str) -> Lookup<Lease> {
    let leases = cluster.namespaced::<Lease>(namespace);
    let permission = format!("get leases in the namespace {namespace}");
    lookup(cluster, &permission, leases.api.get(name)).await
}

async fn events_of(
    kind: &str,
    namespace: &str,
    name: &str,
    home: &Connection,
) -> Lookup<Vec<PastEvent>> {
    let events = home.namespaced::<Event>(namespace);
    let selector = format!("regarding.kind={kind},regarding.name={name}");
    let params = ListParams::default().fields(&selector).limit(MAX_EVENTS);
    lookup(home, "list events", async {
        let list = events.api.list(&params).await?;
        let mut events: Vec<PastEvent> = list.items.into_iter().filter_map(past_event).collect();
        events.sort_by_key(|event| event.at);
        Ok(events)
    })
    .await
}

fn past_event(event: Event) -> Option<PastEvent> {
    let last_in_series = event.series.map(|series| series.last_observed_time.0);
    let at = last_in_series
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

/// Runs a request that needs the right `permission`.
pub(crate) async fn lookup<T>(
    cluster: &Connection,
    permission: &str,
    request: impl Future<Output = kube::Result<T>>,
) -> Lookup<T> {
    let deadline = cluster.request_timeout.unwrap_or(CALL);
    match call_within(deadline, permission.to_owned(), request).await {
        Ok(response) => Lookup::Found(response),
        Err(error) => match (error.code(), error) {
            (Some(404), _) => Lookup::NotFound,
            (Some(401 | 403), _) => Lookup::NotPermitted(permission.to_owned()),
            (_, ApiError::Failed { source, .. }) => {
                Lookup::Failed(one_line(&api_error_message(&source)))
            }
            (_, ApiError::Timeout { deadline, .. }) => {
                Lookup::Failed(format!("no response within {} s", deadline.as_secs_f32()))
            }
        },
    }
}
