//! Bodies of the kind `Status`.

use bytes::Bytes;
use http::{Response, StatusCode, header};
use serde_json::{Value, json};

use crate::cause::Cause;
use crate::kind::Kind;

/// A request that fails, as a `Status` or as text.
#[derive(Debug)]
pub(crate) struct Failure {
    code: u16,
    pub(crate) body: Value,
}

pub(crate) type Outcome<T> = Result<T, Box<Failure>>;

impl Failure {
    pub(crate) fn new(code: u16, reason: &str, message: String, details: Value) -> Box<Self> {
        let mut body = json!({
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": message,
            "code": code,
        });
        if !reason.is_empty() {
            body["reason"] = reason.into();
        }
        if !details.is_null() {
            body["details"] = details;
        }
        Box::new(Self { code, body })
    }

    /// Returns the failure for a request that the simulation doesn't model.
    pub(crate) fn not_modelled(feature: impl std::fmt::Display) -> Box<Self> {
        let message = format!("the simulated API server does not model {feature}");
        Self::new(501, "NotImplemented", message, Value::Null)
    }

    /// Returns the response to a path that the server doesn't serve.
    pub(crate) fn no_such_path() -> Box<Self> {
        let body = Value::String("404 page not found\n".to_owned());
        Box::new(Self { code: 404, body })
    }

    pub(crate) fn not_found(kind: &Kind, name: &str) -> Box<Self> {
        let message = format!("{} {name:?} not found", kind.group_resource());
        Self::new(404, "NotFound", message, status_details(kind, name))
    }

    pub(crate) fn already_exists(kind: &Kind, name: &str, is_terminating: bool) -> Box<Self> {
        let prefix = match is_terminating {
            true => "object is being deleted: ",
            false => "",
        };
        let message = format!("{prefix}{} {name:?} already exists", kind.group_resource());
        Self::new(409, "AlreadyExists", message, status_details(kind, name))
    }

    pub(crate) fn conflict(kind: &Kind, name: &str, cause: &str) -> Box<Self> {
        let qualified = kind.group_resource();
        let message = format!("Operation cannot be fulfilled on {qualified} {name:?}: {cause}");
        Self::new(409, "Conflict", message, status_details(kind, name))
    }

    pub(crate) fn modified(kind: &Kind, name: &str) -> Box<Self> {
        let cause = "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, cause)
    }

    /// Returns the failed precondition of a DELETE, which names the kind instead of the resource.
    pub(crate) fn precondition(kind: &Kind, name: &str, cause: &str) -> Box<Self> {
        let qualified = match kind.group.as_str() {
            "" => kind.kind.clone(),
            group => format!("{}.{group}", kind.kind),
        };
        let message = format!("Operation cannot be fulfilled on {qualified} {name:?}: {cause}");
        let mut details = status_details(kind, name);
        details["kind"] = kind.kind.as_str().into();
        Self::new(409, "Conflict", message, details)
    }

    pub(crate) fn invalid(kind: &Kind, name: &str, causes: &[Cause]) -> Box<Self> {
        Self::invalid_as(&kind.kind, kind, name, causes)
    }

    /// Returns the failure of an update without a version, which names the resource instead of the kind.
    pub(crate) fn invalid_resource(kind: &Kind, name: &str, causes: &[Cause]) -> Box<Self> {
        Self::invalid_as(&kind.resource, kind, name, causes)
    }

    fn invalid_as(shown_kind: &str, kind: &Kind, name: &str, causes: &[Cause]) -> Box<Self> {
        let text = join_causes(causes);
        let mut details = status_details(kind, name);
        let qualified = match kind.stored_group() {
            "" => shown_kind.to_owned(),
            group => format!("{shown_kind}.{group}"),
        };
        // The server validates an Event of any version as one of the core group.
        if kind.stored_group().is_empty()
            && let Some(details) = details.as_object_mut()
        {
            details.remove("group");
        }
        details["kind"] = shown_kind.into();
        details["causes"] = causes.iter().map(Cause::to_json).collect();
        let message = format!("{qualified} {name:?} is invalid: {text}");
        Self::new(422, "Invalid", message, details)
    }

    /// Returns the failure for invalid parameters, such as `ListOptions`.
    pub(crate) fn invalid_options(options: &str, causes: &[Cause]) -> Box<Self> {
        let message = format!(
            "{options}.meta.k8s.io \"\" is invalid: {}",
            join_causes(causes)
        );
        let causes: Vec<Value> = causes.iter().map(Cause::to_json).collect();
        let details = json!({"group": "meta.k8s.io", "kind": options, "causes": causes});
        Self::new(422, "Invalid", message, details)
    }

    /// Returns the failure of a patch whose result cannot be decoded.
    pub(crate) fn undecodable_patch(patched: &Value, problem: &str) -> Box<Self> {
        let cause = Cause::invalid("patch", &patched.to_string().into(), problem);
        let message = format!(
            " \"\" is invalid: {}",
            join_causes(std::slice::from_ref(&cause))
        );
        Self::new(
            422,
            "Invalid",
            message,
            json!({"causes": [cause.to_json()]}),
        )
    }

    /// Returns the failure of a patch that changes the kind of a custom resource.
    pub(crate) fn changed_kind(kind: &Kind, new_kind: &str, name: &str) -> Box<Self> {
        let problem = format!("must be {}", kind.kind);
        let cause = Cause::invalid("kind", &new_kind.into(), &problem);
        Self::invalid_as(new_kind, kind, name, &[cause])
    }

    pub(crate) fn forbidden(kind: &Kind, name: &str, cause: &str) -> Box<Self> {
        let message = format!("{} {name:?} is forbidden: {cause}", kind.group_resource());
        Self::new(403, "Forbidden", message, status_details(kind, name))
    }

    pub(crate) fn namespace_terminating(kind: &Kind, name: &str, namespace: &str) -> Box<Self> {
        let cause = format!(
            "unable to create new content in namespace {namespace} because it is being terminated"
        );
        let mut failure = Self::forbidden(kind, name, &cause);
        failure.body["details"]["causes"] = json!([{
            "reason": "NamespaceTerminating",
            "message": format!("namespace {namespace} is being terminated"),
            "field": "metadata.namespace",
        }]);
        failure
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Box<Self> {
        Self::new(400, "BadRequest", message.into(), Value::Null)
    }

    pub(crate) fn expired(message: impl Into<String>) -> Box<Self> {
        Self::new(410, "Expired", message.into(), Value::Null)
    }

    pub(crate) fn expired_token(token: &str) -> Box<Self> {
        let message = "The provided continue parameter is too old to display a consistent list result. You can start \
                       a new list without the continue parameter, or use the continue token in this response to \
                       retrieve the remainder of the results. Continuing with the provided token results in an \
                       inconsistent list - objects that were created, modified, or deleted between the time the \
                       first chunk was returned and now may show up in the list.";
        let mut failure = Self::expired(message);
        failure.body["metadata"]["continue"] = token.into();
        failure
    }

    pub(crate) fn too_large_version(requested: u64, current: u64) -> Box<Self> {
        let message =
            format!("Timeout: Too large resource version: {requested}, current: {current}");
        let causes =
            json!([{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]);
        let details = json!({"causes": causes, "retryAfterSeconds": 1});
        Self::new(504, "Timeout", message, details)
    }

    pub(crate) fn method_not_allowed() -> Box<Self> {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message.to_owned(), json!({}))
    }

    /// Returns the failure for a patch of an unknown type.
    pub(crate) fn unsupported_patch() -> Box<Self> {
        let message = "415: Unsupported Media Type".to_owned();
        Self::new(415, "UnsupportedMediaType", message, json!({}))
    }

    pub(crate) fn not_acceptable(is_watch: bool) -> Box<Self> {
        let stream_types = match is_watch {
            true => {
                ", application/json;stream=watch, application/vnd.kubernetes.protobuf;stream=watch"
            }
            false => "",
        };
        let message = "406: Not Acceptable\n\nAvailable representations: application/json, application/yaml, \
                       application/vnd.kubernetes.protobuf";
        Self::new(
            406,
            "NotAcceptable",
            format!("{message}{stream_types}"),
            json!({}),
        )
    }

    /// Returns the failure for a resource or version that a built-in group doesn't have.
    pub(crate) fn no_such_resource() -> Box<Self> {
        let message = "the server could not find the requested resource".to_owned();
        Self::new(404, "NotFound", message, json!({}))
    }

    pub(crate) fn unsupported_media_type(accepted: &str) -> Box<Self> {
        let message = format!(
            "the body of the request was in an unknown format - accepted media types include: {accepted}"
        );
        Self::new(415, "UnsupportedMediaType", message, Value::Null)
    }

    pub(crate) fn message(&self) -> &str {
        self.body["message"].as_str().unwrap_or_default()
    }

    /// Returns the event of the type `ERROR` with this failure.
    pub(crate) fn event(&self) -> Bytes {
        let event = json!({"type": "ERROR", "object": self.body});
        Bytes::from(event.to_string() + "\n")
    }

    pub(crate) fn response(&self) -> Response<Bytes> {
        match &self.body {
            Value::String(text) => respond(self.code, "text/plain; charset=utf-8", text.clone()),
            body => {
                let mut response = respond(self.code, "application/json", body.to_string());
                if self.code == 504 {
                    let value = http::HeaderValue::from_static("1");
                    response.headers_mut().insert(header::RETRY_AFTER, value);
                }
                response
            }
        }
    }
}

/// Joins the distinct causes.
fn join_causes(causes: &[Cause]) -> String {
    let mut texts: Vec<String> = Vec::new();
    for cause in causes {
        let text = format!("{}: {}", cause.field, cause.message);
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    match &*texts {
        [text] => text.clone(),
        texts => format!("[{}]", texts.join(", ")),
    }
}

/// Returns the field `details` of a `Status`.
fn status_details(kind: &Kind, name: &str) -> Value {
    let mut details = json!({"kind": kind.resource});
    if !kind.group.is_empty() {
        details["group"] = kind.group.as_str().into();
    }
    if !name.is_empty() {
        details["name"] = name.into();
    }
    details
}

/// Returns the status of an object that a DELETE removed.
pub(crate) fn deletion_status(kind: &Kind, name: &str, uid: &str) -> Value {
    let mut details = status_details(kind, name);
    details["uid"] = uid.into();
    json!({
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": details,
    })
}

pub(crate) fn respond(
    code: u16,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Bytes> {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(code).unwrap_or_default();
    let content_type = http::HeaderValue::from_static(content_type);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type);
    response
}
