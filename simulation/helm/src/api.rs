//! Requests to the API server, and the objects of a manifest with their resources.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use http::{Method, Request, header};
use krypton_helm::releases::manifest;
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use serde_json::Value;

use crate::fault::{ErrorCause, HelmError};
use crate::kinds;

/// client-go retries a request this often if the API server requests it.
const RETRIES: u32 = 10;

/// Media types of patches.
pub(crate) const APPLY: &str = "application/apply-patch+yaml";
pub(crate) const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json";

pub(crate) struct Api {
    client: Client,
    /// Resources of kinds that are not built in, by API version and kind.
    discovered: Mutex<BTreeMap<(String, String), (String, bool)>>,
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").finish_non_exhaustive()
    }
}

/// An object of a manifest.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) api_version: String,
    pub(crate) kind: String,
    /// Empty for a cluster-scoped object.
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) value: Value,
    plural: String,
}

impl Object {
    pub(crate) fn group(&self) -> &str {
        let split = self.api_version.split_once('/');
        split.map_or("", |(group, _)| group)
    }

    fn collection(&self) -> String {
        let root = if self.api_version.contains('/') {
            "apis"
        } else {
            "api"
        };
        let (version, plural) = (&self.api_version, &self.plural);
        if self.namespace.is_empty() {
            format!("/{root}/{version}/{plural}")
        } else {
            let namespace = &self.namespace;
            format!("/{root}/{version}/namespaces/{namespace}/{plural}")
        }
    }

    fn path(&self) -> String {
        format!("{}/{}", self.collection(), self.name)
    }

    /// Returns the group, version and kind as client-go prints them.
    pub(crate) fn gvk(&self) -> String {
        let slash = if self.api_version.contains('/') {
            ""
        } else {
            "/"
        };
        format!("{slash}{}, Kind={}", self.api_version, self.kind)
    }

    /// Returns namespace, name and kind for error messages.
    pub(crate) fn description(&self) -> String {
        format!("{}/{} {}", self.namespace, self.name, self.gvk())
    }

    /// Returns whether both are the same object, in any version of its API.
    pub(crate) fn matches(&self, other: &Self) -> bool {
        self.kind == other.kind
            && self.group() == other.group()
            && self.namespace == other.namespace
            && self.name == other.name
    }

    pub(crate) fn annotation(&self, name: &str) -> Option<&str> {
        self.value
            .pointer("/metadata/annotations")?
            .get(name)?
            .as_str()
    }
}

impl Api {
    pub(crate) fn new(client: Client) -> Self {
        Self {
            client,
            discovered: Mutex::default(),
        }
    }

    /// Reads the objects of a manifest, in its order. Objects without a namespace get `namespace`.
    pub(crate) async fn build(
        &self,
        text: &str,
        namespace: &str,
    ) -> Result<Vec<Object>, HelmError> {
        let (values, unread) = manifest::read(text);
        if unread > 0 {
            return Err(HelmError::new(
                "error parsing : error converting YAML to JSON: yaml: unmarshal errors",
            ));
        }
        let mut objects = Vec::new();
        for value in values {
            objects.push(self.build_object(value, namespace).await?);
        }
        Ok(objects)
    }

    async fn build_object(
        &self,
        mut value: Value,
        default_namespace: &str,
    ) -> Result<Object, HelmError> {
        let text = |value: &Value, pointer: &str| {
            let text = value.pointer(pointer).and_then(Value::as_str);
            text.unwrap_or_default().to_owned()
        };
        let (api_version, kind) = (text(&value, "/apiVersion"), text(&value, "/kind"));
        let name = text(&value, "/metadata/name");
        let mut namespace = text(&value, "/metadata/namespace");
        if api_version.is_empty() || kind.is_empty() {
            return Err(HelmError::new(
                "unable to decode \"\": Object 'Kind' is missing",
            ));
        }
        let Some((plural, namespaced)) = self.resource(&api_version, &kind).await? else {
            return Err(HelmError::new(format!(
                "resource mapping not found for name: \"{name}\" namespace: \"{namespace}\" from \"\": no matches \
                 for kind \"{kind}\" in version \"{api_version}\"\nensure CRDs are installed first"
            )));
        };
        if !namespaced {
            namespace.clear();
        } else if namespace.is_empty() {
            default_namespace.clone_into(&mut namespace);
        }
        if namespaced && let Some(metadata) = value.get_mut("metadata") {
            metadata["namespace"] = Value::from(namespace.clone());
        }
        Ok(Object {
            api_version,
            kind,
            namespace,
            name,
            value,
            plural,
        })
    }

    /// Returns the resource of a kind, and whether its objects have a namespace.
    async fn resource(
        &self,
        api_version: &str,
        kind: &str,
    ) -> Result<Option<(String, bool)>, HelmError> {
        let group = api_version.split_once('/').map_or("", |(group, _)| group);
        if let Some((plural, namespaced)) = kinds::built_in(group, kind) {
            return Ok(Some((plural.to_owned(), namespaced)));
        }
        let key = (api_version.to_owned(), kind.to_owned());
        let cached = self.discovered.lock().get(&key).cloned();
        if cached.is_some() || group.is_empty() {
            return Ok(cached);
        }
        let list = match self.read(&format!("/apis/{api_version}")).await {
            Err(error) if error.is_not_found() => return Ok(None),
            list => list?,
        };
        let resources = list.get("resources").and_then(Value::as_array);
        let resource_and_scope = resources.into_iter().flatten().find(|resource| {
            let name = resource["name"].as_str().unwrap_or_default();
            resource["kind"] == *kind && !name.contains('/')
        });
        let resource_and_scope = resource_and_scope.and_then(|resource| {
            Some((
                resource["name"].as_str()?.to_owned(),
                resource["namespaced"].as_bool()?,
            ))
        });
        if let Some(resource_and_scope) = &resource_and_scope {
            self.discovered
                .lock()
                .insert(key, resource_and_scope.clone());
        }
        Ok(resource_and_scope)
    }

    /// Checks that the API server responds.
    pub(crate) async fn check_reachable(&self) -> Result<(), HelmError> {
        let version = self.read("/version").await;
        version
            .map(drop)
            .map_err(|error| error.context("kubernetes cluster unreachable"))
    }

    pub(crate) async fn read(&self, path: &str) -> Result<Value, HelmError> {
        self.send(Method::GET, path, None).await
    }

    pub(crate) async fn get(&self, object: &Object) -> Result<Value, HelmError> {
        self.read(&object.path()).await
    }

    pub(crate) async fn create(&self, object: &Object) -> Result<Value, HelmError> {
        let path = format!("{}?fieldManager=helm", object.collection());
        self.send(Method::POST, &path, Some((JSON, &object.value)))
            .await
    }

    pub(crate) async fn apply(&self, object: &Object, force: bool) -> Result<Value, HelmError> {
        let path = object.path();
        let path = format!("{path}?fieldManager=helm&fieldValidation=Strict&force={force}");
        self.send(Method::PATCH, &path, Some((APPLY, &object.value)))
            .await
    }

    pub(crate) async fn merge(&self, object: &Object, patch: &Value) -> Result<Value, HelmError> {
        let path = format!("{}?fieldManager=helm", object.path());
        self.send(Method::PATCH, &path, Some((MERGE, patch))).await
    }

    /// Deletes an object. Its dependents follow in the background.
    pub(crate) async fn delete(&self, object: &Object) -> Result<(), HelmError> {
        let options = serde_json::json!({
            "kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background",
        });
        let body = Some((JSON, &options));
        self.send(Method::DELETE, &object.path(), body)
            .await
            .map(drop)
    }

    /// Writes JSON to a path.
    pub(crate) async fn write(
        &self,
        method: Method,
        path: &str,
        value: Option<&Value>,
    ) -> Result<Value, HelmError> {
        self.send(method, path, value.map(|value| (JSON, value)))
            .await
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Value, HelmError> {
        let mut retries_left = RETRIES;
        loop {
            let response = self.send_once(&method, path, body).await?;
            match response {
                ApiResponse::Success(value) => return Ok(value),
                ApiResponse::RetryAfter(delay, _) if retries_left > 0 => {
                    tokio::time::sleep(delay).await;
                }
                ApiResponse::RetryAfter(_, error) | ApiResponse::Refused(error) => {
                    return Err(error);
                }
            }
            retries_left -= 1;
        }
    }

    async fn send_once(
        &self,
        method: &Method,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<ApiResponse, HelmError> {
        let request_error = |error: &dyn std::error::Error| {
            let mut verb = method.as_str().to_lowercase();
            if let Some(first) = verb.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            HelmError::new(format!("{verb} \"{path}\": {}", error_chain(error)))
        };
        let mut request = Request::builder()
            .method(method.clone())
            .uri(path)
            .header(header::ACCEPT, JSON)
            .header(header::USER_AGENT, "Helm");
        let mut bytes = Vec::new();
        if let Some((media_type, value)) = body {
            request = request.header(header::CONTENT_TYPE, media_type);
            bytes = serde_json::to_vec(value).map_err(|error| request_error(&error))?;
        }
        let request = request
            .body(Body::from(bytes))
            .map_err(|error| request_error(&error))?;
        let response = Box::pin(self.client.send(request)).await;
        let (head, body) = response
            .map_err(|error| request_error(&error))?
            .into_parts();
        let body = body
            .collect_bytes()
            .await
            .map_err(|error| request_error(&error))?;
        let value = serde_json::from_slice(&body);
        if head.status.is_success() {
            return value
                .map(ApiResponse::Success)
                .map_err(|error| request_error(&error));
        }
        let error = status_error(head.status.as_u16(), &value.unwrap_or_default());
        let retry_after = head.headers.get(header::RETRY_AFTER);
        let retry_after =
            retry_after.and_then(|retry_after| retry_after.to_str().ok()?.parse().ok());
        let is_retryable = head.status.as_u16() == 429 || head.status.is_server_error();
        Ok(match retry_after {
            Some(seconds) if is_retryable => {
                ApiResponse::RetryAfter(Duration::from_secs(seconds), error)
            }
            _ => ApiResponse::Refused(error),
        })
    }
}

enum ApiResponse {
    Success(Value),
    /// The API server requests a retry after this time.
    RetryAfter(Duration, HelmError),
    Refused(HelmError),
}

fn status_error(code: u16, status: &Value) -> HelmError {
    let text = |field: &str| status[field].as_str().unwrap_or_default().to_owned();
    let message = match (text("message"), code) {
        (message, _) if !message.is_empty() => message,
        (_, 404) => "the server could not find the requested resource".to_owned(),
        (_, 429) => "the server has received too many requests and has asked us to try again later"
            .to_owned(),
        (_, 503) => "the server is currently unable to handle the request".to_owned(),
        _ => format!(
            "an error on the server (code {code}) has prevented the request from succeeding"
        ),
    };
    HelmError {
        message,
        cause: ErrorCause::Status {
            code,
            reason: text("reason"),
        },
    }
}

fn error_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
