//! Collects the sources of an explanation: each request has its own deadline and records why it failed.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::events::v1::Event;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_crds::tenant::Tenant;
use krypton_runtime::access::reason_of;
use krypton_runtime::lease::{LEASE_NAME, SYSTEM_NAMESPACE};
use krypton_types::conditions::{self, Standing};
use krypton_types::names::HUB_LEASE;
use krypton_types::tenant::TenantKey;
use kube::api::{Api, ListParams};
use kube::core::ApiResource;

use crate::commands::join;
use crate::error::{KubectlError, call_failed};
use crate::home::{Connection, Place};
use crate::render::one_line;

const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum number of members with separate lines.
pub(super) const MOST_MEMBERS: usize = 10;
const MOST_EVENTS: u32 = 500;

/// Result of a request.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Asking<T> {
    Found(T),
    /// The object or its kind does not exist.
    None,
    /// The missing verb and its resource.
    NotPermitted(String),
    NoAnswer(String),
}

/// Options of the command in addition to the Tenant.
#[derive(Clone, Copy, Debug)]
pub(super) struct Asked<'a> {
    pub(super) on: Option<&'a str>,
    pub(super) hub_namespace: Option<&'a str>,
}

/// All sources of an explanation.
#[derive(Clone, Debug)]
pub(super) struct Sources {
    pub(super) tenant: Asking<Tenant>,
    /// Leader election Lease of the hubs.
    pub(super) lead: Asking<Lease>,
    /// Lease of this cluster if it is an edge cluster.
    pub(super) acts: Asking<Lease>,
    /// Namespaces searched for the hubs' Lease.
    pub(super) hub_namespaces: Vec<String>,
    /// Members to explain.
    pub(super) members: BTreeMap<String, Asking<EdgeCluster>>,
    /// Events of the Tenant, newest last.
    pub(super) events: Asking<Vec<Happened>>,
}

/// One event, or a series of equal ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Happened {
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
    asked: Asked<'_>,
    home: &Connection,
) -> Result<Sources, KubectlError> {
    let (tenant, acts, (lead, hub_namespaces), events) = tokio::join!(
        tenant(key, home),
        acts(home),
        lead(asked.hub_namespace, home),
        events(key, home),
    );
    let tenant = tenant?;
    if tenant == Asking::None && asked.on.is_none() {
        return Err(KubectlError::NoTenant {
            context: home.context.clone(),
            tenant: key.to_string(),
        });
    }
    let names = members_to_tell(&tenant, asked.on);
    let api: Api<EdgeCluster> = Api::all(home.client.clone());
    let looking = names.into_iter().map(|name| {
        let api = api.clone();
        async move {
            let found = asked_for("get edgeclusters", api.get(&name)).await;
            (name, found)
        }
    });
    let members = futures::future::join_all(looking).await;
    Ok(Sources {
        tenant,
        lead,
        acts,
        hub_namespaces,
        members: members.into_iter().collect(),
        events,
    })
}

/// Returns the members that the Tenant is on or names, limited to those in the worst state.
pub(super) fn members_to_tell(tenant: &Asking<Tenant>, on: Option<&str>) -> Vec<String> {
    if let Some(member) = on {
        return vec![member.to_owned()];
    }
    let Asking::Found(tenant) = tenant else {
        return Vec::new();
    };
    let status = tenant.status.clone().unwrap_or_default();
    let mut clusters: Vec<_> = conditions::clusters(&status.conditions)
        .into_iter()
        .map(|(name, state)| (Standing::of(&state, false), name))
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

async fn tenant(key: &TenantKey, home: &Connection) -> Result<Asking<Tenant>, KubectlError> {
    let api: Api<Tenant> = Api::namespaced(home.client.clone(), &key.namespace);
    let place = Place::Namespace(key.namespace.clone());
    match home.in_time(api.get_opt(&key.name)).await? {
        Ok(found) => Ok(found.map_or(Asking::None, Asking::Found)),
        Err(kube::Error::Api(status)) if status.code == 403 => {
            Ok(Asking::NotPermitted("get tenants".to_owned()))
        }
        Err(error) => {
            let kind = ApiResource::erase::<Tenant>(&());
            Err(call_failed(error, "get", &kind, &place, &home.context))
        }
    }
}

/// Returns the first Lease found, otherwise the most relevant failure.
async fn lead(named: Option<&str>, home: &Connection) -> (Asking<Lease>, Vec<String>) {
    let places = join::places(named, &home.namespace);
    let mut answer = Asking::None;
    for namespace in &places {
        let api: Api<Lease> = Api::namespaced(home.client.clone(), namespace);
        let what = format!("get leases in the namespace {namespace}");
        match asked_for(&what, api.get(HUB_LEASE)).await {
            Asking::None => {}
            Asking::Found(lease) => return (Asking::Found(lease), vec![namespace.clone()]),
            other => answer = other,
        }
    }
    (answer, places)
}

async fn acts(cluster: &Connection) -> Asking<Lease> {
    let api: Api<Lease> = Api::namespaced(cluster.client.clone(), SYSTEM_NAMESPACE);
    let what = format!("get leases in the namespace {SYSTEM_NAMESPACE}");
    asked_for(&what, api.get(LEASE_NAME)).await
}

async fn events(key: &TenantKey, home: &Connection) -> Asking<Vec<Happened>> {
    let api: Api<Event> = Api::namespaced(home.client.clone(), &key.namespace);
    let of = format!("regarding.kind=Tenant,regarding.name={}", key.name);
    let params = ListParams::default().fields(&of).limit(MOST_EVENTS);
    match asked_for("list events", api.list(&params)).await {
        Asking::Found(list) => {
            let mut happened: Vec<Happened> = list.items.into_iter().filter_map(read).collect();
            happened.sort_by_key(|event| event.at);
            Asking::Found(happened)
        }
        Asking::None => Asking::None,
        Asking::NotPermitted(what) => Asking::NotPermitted(what),
        Asking::NoAnswer(why) => Asking::NoAnswer(why),
    }
}

fn read(event: Event) -> Option<Happened> {
    let series = event.series.map(|series| series.last_observed_time.0);
    let at = series
        .or(event.event_time.map(|time| time.0))
        .or(event.deprecated_last_timestamp.map(|time| time.0))
        .or(event.metadata.creation_timestamp.map(|time| time.0))?;
    Some(Happened {
        at,
        warning: event.type_.as_deref() == Some("Warning"),
        reason: event.reason.unwrap_or_default(),
        message: event.note.unwrap_or_default(),
    })
}

async fn asked_for<T>(what: &str, call: impl Future<Output = kube::Result<T>>) -> Asking<T> {
    match tokio::time::timeout(DEADLINE, call).await {
        Ok(Ok(found)) => Asking::Found(found),
        Ok(Err(kube::Error::Api(status))) => match status.code {
            404 => Asking::None,
            401 | 403 => Asking::NotPermitted(what.to_owned()),
            _ => Asking::NoAnswer(one_line(&status.message)),
        },
        Ok(Err(error)) => Asking::NoAnswer(one_line(&reason_of(&error))),
        Err(_) => Asking::NoAnswer(format!("no answer within {} s", DEADLINE.as_secs())),
    }
}
