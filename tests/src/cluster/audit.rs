//! Reads the API server's audit log: users, requests and rejections.

use std::{collections::BTreeMap, fmt, path::Path};

use anyhow::{Context, Result};
use jiff::Timestamp;
use serde::Deserialize;

/// Logs the metadata of every request once its response is sent. For a watch, this is when it ends.
pub(super) const POLICY: &str = "apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived, ResponseStarted, Panic]
rules: [{level: Metadata}]
";
const FORBIDDEN: u16 = 403;
/// Key for the token of a service account: `JTI=<uid>`.
const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// A completed request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Request {
    /// The verb as in RBAC: get, list, watch, create, ...
    pub verb: String,
    pub user: User,
    /// The impersonated user, if any.
    pub impersonated_user: Option<User>,
    pub user_agent: String,
    #[serde(rename = "requestURI")]
    pub uri: String,
    #[serde(rename = "objectRef")]
    pub object: Object,
    #[serde(rename = "responseStatus")]
    pub response: ResponseStatus,
    #[serde(rename = "requestReceivedTimestamp")]
    pub received: Timestamp,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct User {
    pub username: String,
    pub extra: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Object {
    pub api_group: String,
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ResponseStatus {
    pub code: u16,
    pub message: String,
}

impl Request {
    /// Returns true if this user sent the request, or another user who impersonated this one.
    pub fn is_of(&self, username: &str) -> bool {
        let impersonated = self.impersonated_user.as_ref();
        self.user.username == username || impersonated.is_some_and(|user| user.username == username)
    }

    pub fn is_denied(&self) -> bool {
        self.response.code == FORBIDDEN
    }

    /// Returns the ID of the service account's token.
    pub fn credential(&self) -> Option<&str> {
        let ids = self.user.extra.get(CREDENTIAL)?;
        ids.first().map(String::as_str)
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Object {
            api_group,
            resource,
            subresource,
            ..
        } = &self.object;
        write!(f, "{} {resource}", self.verb)?;
        for (sign, part) in [('.', api_group), ('/', subresource)] {
            if !part.is_empty() {
                write!(f, "{sign}{part}")?;
            }
        }
        write!(f, " ({}) by {}", self.uri, self.user.username)?;
        if let Some(user) = &self.impersonated_user {
            write!(f, " as {}", user.username)?;
        }
        write!(f, ", {}: {}", self.user_agent, self.response.code)?;
        if !self.response.message.is_empty() {
            write!(f, " {}", self.response.message)?;
        }
        Ok(())
    }
}

/// Returns all completed requests. Ignores an incomplete last line.
pub(super) fn read(log: &Path) -> Result<Vec<Request>> {
    let text =
        std::fs::read_to_string(log).with_context(|| format!("reading {}", log.display()))?;
    parse(&text)
}

fn parse(text: &str) -> Result<Vec<Request>> {
    let lines = text.split_inclusive('\n');
    lines
        .filter(|line| line.ends_with('\n'))
        .map(|line| serde_json::from_str(line).with_context(|| format!("in the audit log: {line}")))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = r#"{"kind":"Event","stage":"ResponseComplete","requestURI":"/api/v1/namespaces/a/secrets/s","verb":"get","user":{"username":"system:serviceaccount:a:krypton","groups":["g"],"extra":{"authentication.kubernetes.io/credential-id":["JTI=1"]}},"impersonatedUser":{"username":"system:serviceaccount:a:helm"},"userAgent":"Helm/4","objectRef":{"resource":"secrets","namespace":"a","name":"s","apiVersion":"v1"},"responseStatus":{"metadata":{},"status":"Failure","message":"no","reason":"Forbidden","code":403}}
{"kind":"Event","requestURI":"/readyz","verb":"get","user":{"username":"admin"},"responseStatus":{"code":200}}
{"kind":"Event","requestURI":"/re"#;

    #[test]
    fn request_belongs_to_caller_and_impersonated_user() {
        let requests = parse(LOG).unwrap();
        let [helm, admin] = &requests[..] else {
            panic!("{requests:?}");
        };
        assert!(helm.is_of("system:serviceaccount:a:krypton") && helm.is_denied());
        assert!(helm.is_of("system:serviceaccount:a:helm"));
        assert_eq!(helm.credential(), Some("JTI=1"));
        assert_eq!(
            helm.to_string(),
            "get secrets (/api/v1/namespaces/a/secrets/s) by system:serviceaccount:a:krypton \
             as system:serviceaccount:a:helm, Helm/4: 403 no"
        );
        assert!(admin.is_of("admin") && !admin.is_denied() && admin.credential().is_none());
    }

    #[test]
    fn invalid_audit_line_is_error() {
        assert!(parse("rubbish\n").is_err());
    }
}
