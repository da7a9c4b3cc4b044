//! Connects to the home cluster and lists its objects.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use krypton_crds::edge_cluster::EdgeCluster;
use krypton_runtime::access::{Found, LocalSource, client_named, local};
use kube::api::{DynamicObject, ListParams};
use kube::config::Kubeconfig;
use kube::core::ApiResource;
use kube::{Api, Client, Config};
use serde_json::{Value, json};

use crate::error::{KubectlError, call_failed};

const USER_AGENT: &str = concat!("kubectl-krypton/", env!("CARGO_PKG_VERSION"));
pub(crate) const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
pub(crate) const PAGE_SIZE: u32 = 500;

/// Which cluster is home.
#[derive(Clone, Debug, Args)]
pub(crate) struct HomeArgs {
    /// Kubeconfig file of the home cluster; by default KUBECONFIG, then .kube/config in HOME.
    #[arg(long, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig; by default its current-context.
    #[arg(long, value_name = "CONTEXT")]
    pub(crate) context: Option<String>,
}

/// Connection to the selected home cluster.
pub(crate) struct Connection {
    pub(crate) client: Client,
    pub(crate) context: String,
    /// Namespace of the context.
    pub(crate) namespace: String,
}

impl Connection {
    pub(crate) async fn in_time<T>(
        &self,
        call: impl Future<Output = T>,
    ) -> Result<T, KubectlError> {
        let answered = tokio::time::timeout(REQUEST_TIMEOUT, call).await;
        answered.map_err(|_| KubectlError::TimedOut {
            context: self.context.clone(),
        })
    }

    pub(crate) fn not_found(&self, what: &str, name: &str, place: &Place) -> KubectlError {
        KubectlError::NotFound {
            context: self.context.clone(),
            what: what.to_owned(),
            name: name.to_owned(),
            place: place.in_words(),
        }
    }

    /// Returns whether the cluster has visible members, as a home cluster does.
    pub(crate) async fn has_members(&self) -> bool {
        let api: Api<EdgeCluster> = Api::all(self.client.clone());
        let one = ListParams::default().limit(1);
        let found = self.in_time(api.list_metadata(&one)).await;
        matches!(found, Ok(Ok(found)) if !found.items.is_empty())
    }
}

pub(crate) async fn connect(
    args: &HomeArgs,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Connection, KubectlError> {
    let home = Box::pin(home(args, env)).await?;
    Ok(Connection {
        context: home.context_name,
        namespace: home.config.default_namespace.clone(),
        client: client_named(home.config, USER_AGENT).map_err(KubectlError::Client)?,
    })
}

/// The contexts of the user's kubeconfigs.
pub(crate) fn contexts(env: &dyn Fn(&str) -> Option<String>) -> Vec<String> {
    let list = env("KUBECONFIG").unwrap_or_default();
    let own = env("HOME").map(|home| PathBuf::from(home).join(".kube/config"));
    let named = std::env::split_paths(&list).filter(|path| !path.as_os_str().is_empty());
    let mut files: Vec<PathBuf> = named.collect();
    if files.is_empty() {
        files.extend(own);
    }
    let read = files
        .iter()
        .filter_map(|file| Kubeconfig::read_from(file).ok());
    read.flat_map(|config| config.contexts)
        .map(|context| context.name)
        .collect()
}

async fn home(
    args: &HomeArgs,
    env: &dyn Fn(&str) -> Option<String>,
) -> Result<Found, KubectlError> {
    let list = env("KUBECONFIG").unwrap_or_default();
    let source = LocalSource {
        flag: args.kubeconfig.clone(),
        kubeconfig_variable: std::env::split_paths(&list)
            .filter(|path| !path.as_os_str().is_empty())
            .collect(),
        user_file: env("HOME").map(|home| PathBuf::from(home).join(".kube/config")),
    };
    local(&source, args.context.as_deref(), Config::incluster)
        .await
        .map_err(KubectlError::Home)
}

/// Scope of a list request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Cluster,
    Namespace(String),
}

impl Place {
    pub(crate) fn in_words(&self) -> String {
        match self {
            Self::Cluster => "in all namespaces".to_owned(),
            Self::Namespace(namespace) => format!("in the namespace {namespace}"),
        }
    }
}

/// Lists untyped objects. An object that does not decode then hides neither the others nor its own fields.
pub(crate) async fn list(
    client: Client,
    kind: &ApiResource,
    place: &Place,
    name: Option<&str>,
    context: &str,
) -> Result<Vec<Value>, KubectlError> {
    let api: Api<DynamicObject> = match place {
        Place::Cluster => Api::all_with(client, kind),
        Place::Namespace(namespace) => Api::namespaced_with(client, namespace, kind),
    };
    let mut params = ListParams::default().limit(PAGE_SIZE);
    if let Some(name) = name {
        params = params.fields(&format!("metadata.name={name}"));
    }
    let mut objects = Vec::new();
    loop {
        let page = tokio::time::timeout(REQUEST_TIMEOUT, api.list(&params))
            .await
            .map_err(|_| KubectlError::TimedOut {
                context: context.to_owned(),
            })?
            .map_err(|error| call_failed(error, "list", kind, place, context))?;
        for object in page.items {
            objects.push(as_value(object, kind)?);
        }
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(objects),
        }
    }
}

/// Formats an object like kubectl: with apiVersion and kind, which lists omit, and without managedFields.
pub(crate) fn as_value(
    mut object: DynamicObject,
    kind: &ApiResource,
) -> Result<Value, KubectlError> {
    object.metadata.managed_fields = None;
    object.types = None;
    let encoded = serde_json::to_value(&object);
    let fields = encoded.map_err(|error| KubectlError::Encode {
        format: "object",
        reason: error.to_string(),
    })?;
    let mut value = json!({ "apiVersion": kind.api_version, "kind": kind.kind });
    if let (Some(value), Value::Object(fields)) = (value.as_object_mut(), fields) {
        value.extend(fields);
    }
    Ok(value)
}
