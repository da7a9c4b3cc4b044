//! A home cluster with a simulated API server, for tests of parts of the hub. It starts within milliseconds, and its
//! conformance is tested against a real API server.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use axum::http::{Request, Response, StatusCode};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use krypton_runtime::clock::wall;
use krypton_sim_apiserver::server::{Answer, ApiServer, Options};
use kube::api::PostParams;
use kube::client::Body;
use kube::{Api, Client};
use parking_lot::Mutex;
use serde_json::json;

/// The API server. It serves no watches.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedHome(Arc<Mutex<StoppableServer>>);

#[derive(Debug)]
struct StoppableServer {
    server: ApiServer,
    stopped: bool,
}

impl SimulatedHome {
    /// Starts a cluster with Krypton's CRDs and the namespace `default`.
    ///
    /// # Errors
    /// Returns an error if the API server rejects them.
    pub(crate) async fn start() -> Result<Self> {
        let options = Options {
            name: "home".to_owned(),
            version: "v1.36.3".to_owned(),
            crd_delay: Duration::ZERO,
            controller_delay: Duration::ZERO,
        };
        let server = ApiServer::new(options, wall());
        let stopped = false;
        let home = Self(Arc::new(Mutex::new(StoppableServer { server, stopped })));
        let crds: Api<CustomResourceDefinition> = Api::all(home.client());
        for crd in krypton_crds::all() {
            crds.create(&PostParams::default(), crd).await?;
        }
        let namespace = json!({"metadata": {"name": "default"}});
        let namespaces = Api::<k8s_openapi::api::core::v1::Namespace>::all(home.client());
        let namespace = serde_json::from_value(namespace)?;
        let created = namespaces.create(&PostParams::default(), &namespace).await;
        let already_exists = created
            .as_ref()
            .err()
            .is_some_and(|error| matches!(error, kube::Error::Api(status) if status.code == 409));
        ensure!(
            created.is_ok() || already_exists,
            "the namespace: {created:?}"
        );
        Ok(home)
    }

    pub(crate) fn client(&self) -> Client {
        let home = self.clone();
        let respond = move |request| {
            let home = home.clone();
            async move { Ok::<_, Infallible>(home.respond(request).await) }
        };
        Client::new(tower::service_fn(respond), "default")
    }

    /// All later requests fail.
    pub(crate) fn stop(&self) {
        self.0.lock().stopped = true;
    }

    async fn respond(&self, request: Request<Body>) -> Response<Body> {
        self.handle(request).await.unwrap_or_else(|error| {
            let mut response = Response::new(Body::from(format!("{error:#}").into_bytes()));
            *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
            response
        })
    }

    async fn handle(&self, request: Request<Body>) -> Result<Response<Body>> {
        let (parts, body) = request.into_parts();
        let request = Request::from_parts(parts, body.collect_bytes().await?);
        // Requests of other tasks may come first.
        tokio::task::yield_now().await;
        let mut state = self.0.lock();
        ensure!(!state.stopped, "the API server is stopped");
        state.server.advance(wall());
        match state.server.handle(wall(), &request) {
            Answer::Complete(response) => Ok(response.map(|bytes| Body::from(bytes.to_vec()))),
            Answer::Watch(_, watch) => {
                state.server.close_watch(watch);
                None.context("watches are not served")
            }
        }
    }
}
