//! Stands in for kube-proxy: a port that routes new connections according to a Service's EndpointSlices.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use anyhow::{Context, Result};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client, api::ListParams};
use parking_lot::Mutex;
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
};
use tokio_util::task::AbortOnDropHandle;

/// Listen addresses of the pods' processes, by pod name.
type Routes = Arc<Mutex<BTreeMap<String, SocketAddr>>>;

/// A Service's port. As with kube-proxy, open connections keep their destination.
#[derive(Debug)]
pub struct ServicePort {
    address: SocketAddr,
    routes: Routes,
    service: Service,
    _accepting: AbortOnDropHandle<()>,
}

#[derive(Debug, Clone)]
struct Service {
    slices: Api<EndpointSlice>,
    name: String,
}

impl ServicePort {
    /// Starts to listen for the Service.
    pub async fn start(client: Client, namespace: &str, name: &str) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("listening for a Service")?;
        let address = listener.local_addr().context("reading the bound port")?;
        let service = Service {
            slices: Api::namespaced(client, namespace),
            name: name.to_owned(),
        };
        let routes = Routes::default();
        let (connection_service, connection_routes) = (service.clone(), Arc::clone(&routes));
        let accepting = tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(forward(
                    client,
                    connection_service.clone(),
                    Arc::clone(&connection_routes),
                ));
            }
        });
        Ok(Self {
            address,
            routes,
            service,
            _accepting: AbortOnDropHandle::new(accepting),
        })
    }

    /// Returns the address at which the port listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the address of this pod's process.
    pub fn route(&self, pod: &str, address: SocketAddr) {
        self.routes.lock().insert(pod.to_owned(), address);
    }

    /// Returns the names of the pods that currently receive connections.
    pub async fn pods(&self) -> Result<Vec<String>> {
        self.service.pods().await
    }
}

impl Service {
    async fn pods(&self) -> Result<Vec<String>> {
        let selector = format!("kubernetes.io/service-name={}", self.name);
        let slices = self
            .slices
            .list(&ListParams::default().labels(&selector))
            .await?;
        let endpoints = slices.items.into_iter().flat_map(|slice| slice.endpoints);
        let ready = endpoints.filter(|endpoint| {
            let conditions = endpoint.conditions.as_ref();
            conditions.and_then(|conditions| conditions.ready) != Some(false)
        });
        Ok(ready
            .filter_map(|endpoint| endpoint.target_ref?.name)
            .collect())
    }
}

/// Closes the connection if there is no ready pod. This is as close to a refusal as an accepted connection gets.
async fn forward(mut client: TcpStream, service: Service, routes: Routes) -> Option<()> {
    let pod = service.pods().await.ok()?.into_iter().next()?;
    let target = routes.lock().get(&pod).copied()?;
    let mut target = TcpStream::connect(target).await.ok()?;
    // Both connections are closed here, after success and after an error.
    copy_bidirectional(&mut client, &mut target)
        .await
        .ok()
        .map(drop)
}
