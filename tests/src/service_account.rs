//! Provides access to a cluster as in a pod: a service account's token in a file, which is replaced before the token
//! expires.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use k8s_openapi::api::{
    authentication::v1::{BoundObjectReference, TokenRequest, TokenRequestSpec},
    core::v1::{Secret, ServiceAccount},
};
use kube::{
    Api, Client, ResourceExt,
    api::{DeleteParams, ObjectMeta, PostParams},
};
use serde_json::Value;
use tempfile::TempDir;

use crate::cluster::Cluster;

/// The shortest lifetime that an API server accepts.
const TOKEN_SECONDS: i64 = 600;

/// A kubeconfig with a token file. Dropping it deletes the files.
#[derive(Debug)]
pub struct ServiceAccountAccess {
    namespace: String,
    account: String,
    folder: TempDir,
    /// The Secret that the file's token is bound to. Deleting it revokes the token.
    bound_to: String,
}

impl ServiceAccountAccess {
    pub async fn new(cluster: &Cluster, namespace: &str, account: &str) -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-account-").context("creating a folder")?;
        let mut access = Self {
            namespace: namespace.to_owned(),
            account: account.to_owned(),
            folder,
            bound_to: String::new(),
        };
        let kubeconfig = cluster.kubeconfig_with_token_file(&access.token_file());
        fs::write(access.kubeconfig(), kubeconfig).context("writing a kubeconfig")?;
        // There is no previous token.
        let PreviousToken(_) = access.renew(cluster).await?;
        Ok(access)
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub fn token_file(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    /// Returns the name of the user in the API server and in RBAC.
    pub fn username(&self) -> String {
        username(&self.namespace, &self.account)
    }

    /// Returns the audit log's ID of the token in the file.
    pub fn credential(&self) -> Result<String> {
        let token = fs::read_to_string(self.token_file()).context("reading a token")?;
        let claims = token.split('.').nth(1).context("a token without claims")?;
        let claims: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims)?)?;
        let id = claims.get("jti").and_then(Value::as_str);
        Ok(format!("JTI={}", id.context("a token without a name")?))
    }

    /// Writes a new token into the file, like the kubelet. The previous token stays valid until it is passed to
    /// `revoke`.
    pub async fn renew(&mut self, cluster: &Cluster) -> Result<PreviousToken> {
        let client = cluster.client();
        let (secret, token) = self.bound_token(&client).await?;
        replace(&self.token_file(), &token)?;
        let previous = std::mem::replace(&mut self.bound_to, secret);
        Ok(PreviousToken(previous))
    }

    /// Revokes a token. It becomes invalid when the API server's cache expires, at most ten seconds later.
    pub async fn revoke(&self, cluster: &Cluster, previous: PreviousToken) -> Result<()> {
        let secrets: Api<Secret> = Api::namespaced(cluster.client(), &self.namespace);
        secrets
            .delete(&previous.0, &DeleteParams::default())
            .await?;
        Ok(())
    }

    async fn bound_token(&self, client: &Client) -> Result<(String, String)> {
        let secrets: Api<Secret> = Api::namespaced(client.clone(), &self.namespace);
        let secret = Secret {
            metadata: ObjectMeta {
                generate_name: Some(format!("{}-token-", self.account)),
                ..Default::default()
            },
            ..Default::default()
        };
        let secret = secrets.create(&PostParams::default(), &secret).await?;
        let request = TokenRequest {
            spec: TokenRequestSpec {
                expiration_seconds: Some(TOKEN_SECONDS),
                bound_object_ref: Some(BoundObjectReference {
                    api_version: Some("v1".to_owned()),
                    kind: Some("Secret".to_owned()),
                    name: Some(secret.name_any()),
                    uid: secret.uid(),
                }),
                ..Default::default()
            },
            ..Default::default()
        };
        let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), &self.namespace);
        let response = accounts
            .create_token_request(&self.account, &PostParams::default(), &request)
            .await
            .with_context(|| format!("requesting a token for {}", self.username()))?;
        let token = response.status.context("no token in the response")?.token;
        Ok((secret.name_any(), token))
    }
}

/// A token that is no longer in the file.
#[derive(Debug)]
#[must_use = "it is good until it is revoked"]
pub struct PreviousToken(String);

/// Returns the user name of a service account in the API server and in RBAC.
pub fn username(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}

/// Replaces the file atomically, like a mounted volume.
fn replace(file: &Path, content: &str) -> Result<()> {
    let next = file.with_extension("next");
    fs::write(&next, content).context("writing a token")?;
    fs::rename(next, file).context("replacing a token")
}
