//! Reads the Tenants that the members have reported from the debug port of the leader.

use std::net::SocketAddr;

use krypton_types::fleet_tenants::{FleetTenant, PATH, Page, Position};
use krypton_types::tenant::TenantKey;
use kube::core::Selector;

use crate::debug_port::DebugPort;
use crate::error::KubectlError;
use crate::home::Connection;
use crate::program::Program;
use crate::running_pods::{active, find};

/// Most Tenants that a command reads.
const MAX_TENANTS: usize = 500_000;

#[derive(Clone, Debug)]
pub(crate) struct FleetTenants {
    pub(crate) tenants: Vec<FleetTenant>,
    /// The members have reported more.
    pub(crate) is_cut_off: bool,
}

/// The Tenants to read.
#[derive(Clone, Debug, Default)]
pub(crate) struct TenantFilter<'a> {
    pub(crate) member: Option<&'a str>,
    pub(crate) namespace: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
    pub(crate) not_ready: bool,
    /// Selects by the labels on the member.
    pub(crate) selector: Selector,
}

impl<'a> TenantFilter<'a> {
    /// A Tenant on one member.
    pub(crate) fn single(member: &'a str, key: &'a TenantKey) -> Self {
        Self {
            member: Some(member),
            namespace: Some(&key.namespace),
            name: Some(&key.name),
            ..Self::default()
        }
    }

    /// Fails if a name could not be one of Kubernetes, and would have another meaning in the query.
    fn validate(&self) -> Result<(), KubectlError> {
        let is_valid = |name: &&str| {
            let mut characters = name.chars();
            characters.all(|it| it.is_ascii_alphanumeric() || matches!(it, '-' | '.'))
        };
        let names = [self.member, self.namespace, self.name];
        match names.iter().flatten().find(|name| !is_valid(name)) {
            Some(name) => Err(KubectlError::Refused(format!(
                "{name:?} is not a valid name"
            ))),
            None => Ok(()),
        }
    }

    /// Path and query of the page after this position.
    fn path(&self, after: Option<&str>) -> String {
        // No other character of a selector needs an escape.
        let selector = self.selector.to_string().replace(' ', "+");
        let parameters = [
            ("member", self.member),
            ("namespace", self.namespace),
            ("name", self.name),
            ("notReady", self.not_ready.then_some("true")),
            (
                "labelSelector",
                Some(selector.as_str()).filter(|it| !it.is_empty()),
            ),
            ("after", after),
        ];
        let parameters = parameters.iter();
        let parameters =
            parameters.filter_map(|(name, value)| Some(format!("{name}={}", (*value)?)));
        let query = parameters.collect::<Vec<_>>().join("&");
        format!("{PATH}?{query}")
    }
}

/// Reads from the leader's pod, or from `address` if given.
pub(crate) async fn read(
    home: &Connection,
    address: Option<SocketAddr>,
    filter: &TenantFilter<'_>,
) -> Result<FleetTenants, KubectlError> {
    filter.validate()?;
    if let Some(address) = address {
        return read_pages(&DebugPort::Address(address), filter, MAX_TENANTS).await;
    }
    let (namespace, pods) = find(Program::Hub, home, home.hub_namespace.as_deref()).await?;
    let leader = active(Program::Hub, pods, home, &namespace).await?;
    let port = leader.debug_port(home);
    read_pages(&port, filter, MAX_TENANTS).await
}

async fn read_pages(
    port: &DebugPort<'_>,
    filter: &TenantFilter<'_>,
    max: usize,
) -> Result<FleetTenants, KubectlError> {
    let (mut tenants, mut after) = (Vec::new(), None::<Position>);
    loop {
        let position = after.as_ref().map(ToString::to_string);
        let path = filter.path(position.as_deref());
        let body = port.send(&path, None).await?;
        let page: Page = serde_json::from_str(&body).map_err(|error| {
            KubectlError::Failed(format!("{} sent invalid Tenants: {error}", port.name()))
        })?;
        tenants.extend(page.tenants);
        let next = match page.next {
            Some(next) if tenants.len() < max => next,
            next => {
                let is_cut_off = next.is_some();
                return Ok(FleetTenants {
                    tenants,
                    is_cut_off,
                });
            }
        };
        // The position only moves on, so the list ends.
        let position = next.parse::<Position>().ok();
        after = position.filter(|next| after.as_ref().is_none_or(|after| after < next));
        if after.is_none() {
            return Err(KubectlError::Failed(format!(
                "{} sent the invalid position {next:?}; upgrade this program to the hub's version",
                port.name()
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use krypton_types::labels::parse_selector;
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn reading_stops_at_limit_and_rejects_repeated_position() {
        let page = r#"{"tenants": [], "next": "edge-1/default/acme"}"#;
        let router = axum::Router::new().fallback(move || async move { page });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = DebugPort::Address(listener.local_addr().unwrap());
        tokio::spawn(axum::serve(listener, router).into_future());
        let filter = TenantFilter::default();
        assert!(read_pages(&port, &filter, 0).await.unwrap().is_cut_off);
        let error = read_pages(&port, &filter, 1).await.unwrap_err().to_string();
        let cause = "invalid position \"edge-1/default/acme\"";
        assert!(error.contains(cause), "{error}");
    }

    #[test]
    fn path_contains_only_given_parameters() {
        let all = TenantFilter::default();
        assert_eq!(all.path(None), "/debug/tenants.json?");
        let key = TenantKey::new("default", "acme");
        let one = TenantFilter {
            not_ready: true,
            selector: parse_selector("team in (a, b),!old").unwrap(),
            ..TenantFilter::single("edge-1", &key)
        };
        assert_eq!(
            one.path(Some("edge-1/a/b")),
            "/debug/tenants.json?member=edge-1&namespace=default&name=acme&notReady=true&labelSelector=team+in+(a,b),!old&after=edge-1/a/b"
        );
    }
}
