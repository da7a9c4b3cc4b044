//! What stands in for kube-proxy: a port whose new connections go where a Service's EndpointSlices say.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context, Result};
use k8s_openapi::api::discovery::v1::EndpointSlice;
use kube::{Api, Client, api::ListParams};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinHandle,
};

/// Where the processes of pods listen, by the pods' names.
type Routes = Arc<Mutex<BTreeMap<String, SocketAddr>>>;

/// A Service's port. Connections that there are stay where they go, as with kube-proxy.
#[derive(Debug)]
pub struct ServicePort {
    address: SocketAddr,
    routes: Routes,
    service: Service,
    accepting: JoinHandle<()>,
}

#[derive(Debug, Clone)]
struct Service {
    slices: Api<EndpointSlice>,
    name: String,
}

impl ServicePort {
    /// # Errors
    /// When it cannot listen.
    pub async fn start(client: Client, namespace: &str, name: &str) -> Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")
            .await
            .context("listening for a Service")?;
        let address = listener.local_addr().context("asking for our own port")?;
        let service = Service {
            slices: Api::namespaced(client, namespace),
            name: name.to_owned(),
        };
        let routes = Routes::default();
        let (of, to) = (service.clone(), Arc::clone(&routes));
        let accepting = tokio::spawn(async move {
            while let Ok((from, _)) = listener.accept().await {
                tokio::spawn(carry(from, of.clone(), Arc::clone(&to)));
            }
        });
        Ok(Self {
            address,
            routes,
            service,
            accepting,
        })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The process of this pod listens there.
    pub fn route(&self, pod: &str, to: SocketAddr) {
        lock(&self.routes).insert(pod.to_owned(), to);
    }

    /// Names of the pods that it leads to now.
    ///
    /// # Errors
    /// When the apiserver does not tell.
    pub async fn pods(&self) -> Result<Vec<String>> {
        self.service.pods().await
    }
}

impl Drop for ServicePort {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

impl Service {
    async fn pods(&self) -> Result<Vec<String>> {
        let of = format!("kubernetes.io/service-name={}", self.name);
        let slices = self.slices.list(&ListParams::default().labels(&of)).await?;
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

/// Nobody there: the connection is refused, as far as one that was accepted can be.
async fn carry(mut from: TcpStream, service: Service, routes: Routes) -> Option<()> {
    let pod = service.pods().await.ok()?.into_iter().next()?;
    let to = lock(&routes).get(&pod).copied()?;
    let mut to = TcpStream::connect(to).await.ok()?;
    // However it ends, both ends are closed.
    copy_bidirectional(&mut from, &mut to).await.ok().map(drop)
}

fn lock(routes: &Routes) -> std::sync::MutexGuard<'_, BTreeMap<String, SocketAddr>> {
    routes.lock().unwrap_or_else(PoisonError::into_inner)
}
