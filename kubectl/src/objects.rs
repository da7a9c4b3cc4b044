//! Reads and changes objects of a cluster. Each request has a deadline, and a failure becomes an error for the user.

use std::fmt;
use std::time::Duration;

use krypton_runtime::call::{ApiError, call_within, if_uid};
use kube::api::{DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, NamespaceResourceScope, TypeMeta};
use kube::{Api, Resource, ResourceExt as _};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::error::{CallError, KubectlError};
use crate::home::Connection;
use crate::render::{list_at, text_at};

/// Default deadline of a request.
pub(crate) const DEADLINE: Duration = Duration::from_secs(30);
const PAGE_SIZE: u32 = 500;
/// Attempts of a write that conflicts with another writer.
const MAX_ATTEMPTS: usize = 3;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    All,
    Namespace(String),
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("in all namespaces"),
            Self::Namespace(namespace) => write!(f, "in the namespace {namespace}"),
        }
    }
}

impl Connection {
    /// All objects of a kind.
    pub(crate) fn all<K: Resource<DynamicType = ()>>(&self) -> Objects<K> {
        let kind = ApiResource::erase::<K>(&());
        Objects::new(Api::all(self.client.clone()), kind, Scope::All, self)
    }

    /// The objects of a kind in one namespace.
    pub(crate) fn namespaced<K>(&self, namespace: &str) -> Objects<K>
    where
        K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
    {
        let api = Api::namespaced(self.client.clone(), namespace);
        let scope = Scope::Namespace(namespace.to_owned());
        Objects::new(api, ApiResource::erase::<K>(&()), scope, self)
    }

    /// Objects of a kind as JSON. An object that does not decode then hides neither the others nor its own fields.
    pub(crate) fn untyped(&self, kind: ApiResource, scope: &Scope) -> Objects<DynamicObject> {
        let client = self.client.clone();
        let api = match scope {
            Scope::All => Api::all_with(client, &kind),
            Scope::Namespace(namespace) => Api::namespaced_with(client, namespace, &kind),
        };
        Objects::new(api, kind, scope.clone(), self)
    }
}

/// The objects of one kind in one scope.
pub(crate) struct Objects<K> {
    pub(crate) api: Api<K>,
    pub(crate) kind: ApiResource,
    scope: Scope,
    context: String,
    deadline: Duration,
}

impl<K> Objects<K> {
    fn new(api: Api<K>, kind: ApiResource, scope: Scope, home: &Connection) -> Self {
        let context = home.context.clone();
        Self {
            api,
            kind,
            scope,
            context,
            deadline: home.request_timeout.unwrap_or(DEADLINE),
        }
    }

    /// Names a subresource in errors.
    pub(crate) fn subresource(mut self, name: &str) -> Self {
        self.kind.plural = format!("{}/{name}", self.kind.plural);
        self
    }

    /// Runs a request. An empty `name` stands for all objects of the scope.
    pub(crate) async fn call<T>(
        &self,
        verb: &'static str,
        name: &str,
        request: impl Future<Output = kube::Result<T>>,
    ) -> Result<T, KubectlError> {
        let response = call_within(self.deadline, self.attempt(verb, name), request).await;
        response.map_err(|error| self.call_error(verb, name, error))
    }

    pub(crate) fn attempt(&self, verb: &'static str, name: &str) -> String {
        let action = match verb {
            "list" | "watch" => "listing",
            "get" => "reading",
            "create" => "creating",
            "delete" => "deleting",
            _ => "writing",
        };
        let space = if name.is_empty() { "" } else { " " };
        let (plural, context) = (&self.kind.plural, &self.context);
        format!("{action} {plural}{space}{name} on the cluster {context:?}")
    }

    pub(crate) fn call_error(
        &self,
        verb: &'static str,
        name: &str,
        error: ApiError,
    ) -> KubectlError {
        let (plural, scope) = (&self.kind.plural, &self.scope);
        KubectlError::Call(Box::new(CallError {
            context: self.context.clone(),
            verb,
            objects: match (name, scope) {
                ("", _) => format!("{plural} {scope}"),
                (_, Scope::All) => format!("{plural} {name}"),
                (_, Scope::Namespace(_)) => format!("{plural} {name} {scope}"),
            },
            resource: match self.kind.group.as_str() {
                "" => plural.clone(),
                group => format!("{plural}.{group}"),
            },
            plural: plural.clone(),
            error,
        }))
    }

    /// The error for a missing object of this kind.
    pub(crate) fn not_found(&self, kind: &str, name: &str) -> KubectlError {
        let (scope, context) = (&self.scope, &self.context);
        KubectlError::NotFound(format!(
            "there is no {kind} of the name {name:?} {scope} on the cluster {context:?}"
        ))
    }
}

impl<K: Clone + fmt::Debug + DeserializeOwned> Objects<K> {
    pub(crate) async fn find(&self, name: &str) -> Result<Option<K>, KubectlError> {
        self.call("get", name, self.api.get_opt(name)).await
    }

    /// Like [`Self::find`]. A missing object is an error.
    pub(crate) async fn get(&self, name: &str) -> Result<K, KubectlError> {
        let object = self.find(name).await?;
        object.ok_or_else(|| self.not_found(&self.kind.kind, name))
    }

    /// Reads page by page until `on_page` returns false. Returns whether it has read all pages.
    pub(crate) async fn for_each_page(
        &self,
        params: ListParams,
        mut on_page: impl FnMut(Vec<K>) -> bool,
    ) -> Result<bool, KubectlError> {
        let mut params = params.limit(PAGE_SIZE);
        loop {
            let page = self.call("list", "", self.api.list(&params)).await?;
            let wants_more = on_page(page.items);
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) if wants_more => params = params.continue_token(&token),
                more => return Ok(more.is_none()),
            }
        }
    }

    pub(crate) async fn list(&self, params: ListParams) -> Result<Vec<K>, KubectlError> {
        let mut objects = Vec::new();
        let add = |mut page: Vec<K>| {
            objects.append(&mut page);
            true
        };
        self.for_each_page(params, add).await?;
        Ok(objects)
    }

    /// Reads the object every `interval` until `check` returns a result. Returns `None` after the deadline. Like
    /// [`poll_patiently`], it retries a failed read.
    pub(crate) async fn wait_for<T>(
        &self,
        name: &str,
        times: (Duration, Duration),
        mut check: impl FnMut(Option<K>) -> Result<Option<T>, KubectlError>,
    ) -> Result<Option<T>, KubectlError> {
        poll_patiently(times, async || check(self.find(name).await?)).await
    }

    /// Creates the object. `name` is empty if the API server generates it.
    pub(crate) async fn create(&self, name: &str, object: &K) -> Result<(), KubectlError>
    where
        K: Serialize,
    {
        let params = PostParams::default();
        let creating = self.api.create(&params, object);
        self.call("create", name, creating).await.map(drop)
    }

    /// Deletes the object if it still has this UID.
    pub(crate) async fn delete(&self, name: &str, uid: Option<String>) -> Result<(), KubectlError> {
        let params = if_uid(uid);
        let deleting = self.call("delete", name, self.api.delete(name, &params));
        deleting.await.map(drop)
    }
}

impl Objects<DynamicObject> {
    /// Lists the objects as kubectl shows them.
    pub(crate) async fn list_values(&self) -> Result<Vec<Value>, KubectlError> {
        self.list_selected(None, None).await
    }

    /// Lists the object of this name, or all, with these labels, by namespace and name.
    pub(crate) async fn list_selected(
        &self,
        name: Option<&str>,
        labels: Option<&str>,
    ) -> Result<Vec<Value>, KubectlError> {
        let mut params = ListParams::default();
        if let Some(name) = name {
            params = params.fields(&format!("metadata.name={name}"));
        }
        if let Some(labels) = labels {
            params = params.labels(labels);
        }
        let mut objects = self.list(params).await?;
        sort_by_name(&mut objects);
        Ok(objects.into_iter().map(|it| self.to_value(it)).collect())
    }

    /// The name of an object as kubectl prints it, with its kind.
    pub(crate) fn full_name(&self, name: &str) -> String {
        format!(
            "{}.{}/{name}",
            self.kind.kind.to_lowercase(),
            self.kind.group
        )
    }

    /// The line of an object for `-o name`.
    pub(crate) fn name_line(&self, object: &Value) -> String {
        let name = text_at(object, "/metadata/name").unwrap_or_default();
        self.full_name(&name) + "\n"
    }

    /// Formats an object like kubectl: with apiVersion and kind, which lists omit, and without managedFields.
    pub(crate) fn to_value(&self, mut object: DynamicObject) -> Value {
        object.metadata.managed_fields = None;
        object.types = Some(TypeMeta {
            api_version: self.kind.api_version.clone(),
            kind: self.kind.kind.clone(),
        });
        serde_json::to_value(object).unwrap_or_default()
    }

    pub(crate) async fn patch(
        &self,
        name: &str,
        patch: &Patch<Value>,
    ) -> Result<DynamicObject, KubectlError> {
        let params = PatchParams::default();
        let patching = self.api.patch(name, &params, patch);
        self.call("patch", name, patching).await
    }

    /// Applies the merge patch that `decide` returns for the object, unless the object has changed since it was read.
    /// After a conflict, reads and decides again. Returns the object and the second result of `decide`.
    pub(crate) async fn change<T>(
        &self,
        name: &str,
        decide: impl Fn(&DynamicObject) -> (Option<Value>, T),
    ) -> Result<(DynamicObject, T), KubectlError> {
        retry_conflicts(&format!("{} {name}", self.kind.kind), async || {
            let object = self.get(name).await?;
            let (patch, result) = decide(&object);
            let Some(mut patch) = patch else {
                return Ok((object, result));
            };
            patch["metadata"]["uid"] = json!(object.metadata.uid);
            patch["metadata"]["resourceVersion"] = json!(object.metadata.resource_version);
            Ok((self.patch(name, &Patch::Merge(patch)).await?, result))
        })
        .await
    }
}

/// Sorts objects by namespace and name, because an API server guarantees no order.
pub(crate) fn sort_by_name(objects: &mut [DynamicObject]) {
    objects.sort_by_cached_key(|object| (object.namespace(), object.name_any()));
}

/// Calls `check` every `interval` until it returns a result. Returns `None` after the deadline.
pub(crate) async fn poll<T>(
    (interval, deadline): (Duration, Duration),
    mut check: impl AsyncFnMut() -> Result<Option<T>, KubectlError>,
) -> Result<Option<T>, KubectlError> {
    let polling = async {
        loop {
            if let Some(result) = check().await? {
                return Ok(Some(result));
            }
            tokio::time::sleep(interval).await;
        }
    };
    let result = tokio::time::timeout(deadline, polling).await;
    result.unwrap_or(Ok(None))
}

/// Like [`poll`], but retries a request that failed because the API server did not respond or was overloaded. After the
/// deadline, returns that failure if it was the latest result.
pub(crate) async fn poll_patiently<T>(
    times: (Duration, Duration),
    mut check: impl AsyncFnMut() -> Result<Option<T>, KubectlError>,
) -> Result<Option<T>, KubectlError> {
    let mut failure = None;
    let attempt = async || match check().await {
        Err(error) if is_transient(&error) => {
            failure = Some(error);
            Ok(None)
        }
        result => {
            failure = None;
            result
        }
    };
    let result = poll(times, attempt).await?;
    match (result, failure) {
        (None, Some(error)) => Err(error),
        (result, _) => Ok(result),
    }
}

/// Returns whether the same request can succeed later.
fn is_transient(error: &KubectlError) -> bool {
    let KubectlError::Call(call) = error else {
        return false;
    };
    match call.error.code() {
        Some(code) => code == 429 || code >= 500,
        None => error.is_timeout() || call.is_unreachable(),
    }
}

/// Returns a condition of the object's status.
pub(crate) fn condition<'o>(object: &'o DynamicObject, type_: &str) -> Option<&'o Value> {
    list_at(&object.data, "/status/conditions").find(|condition| condition["type"] == type_)
}

/// Repeats an attempt to change an object that another writer has changed in the meantime.
pub(crate) async fn retry_conflicts<T>(
    object: &str,
    attempt: impl AsyncFn() -> Result<T, KubectlError>,
) -> Result<T, KubectlError> {
    for _ in 0..MAX_ATTEMPTS {
        match attempt().await {
            Err(error) if error.code() == Some(409) => {}
            result => return result,
        }
    }
    Err(KubectlError::Refused(format!(
        "{object} changed during every attempt; stop the other writer and retry"
    )))
}
