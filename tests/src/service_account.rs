//! A process' access to a cluster as a pod has it: a service account's token in a file that is
//! replaced before the token runs out.

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

/// The shortest that an apiserver gives.
const TOKEN_SECONDS: i64 = 600;

/// A kubeconfig that names a token file, with a token in it. It goes with this.
#[derive(Debug)]
pub struct ServiceAccountAccess {
    namespace: String,
    account: String,
    folder: TempDir,
    /// Secret that the token in the file is bound to: gone with it.
    bound_to: String,
}

impl ServiceAccountAccess {
    pub async fn new(cluster: &Cluster, namespace: &str, account: &str) -> Result<Self> {
        let folder = TempDir::with_prefix("krypton-account-").context("making a folder")?;
        let mut access = Self {
            namespace: namespace.to_owned(),
            account: account.to_owned(),
            folder,
            bound_to: String::new(),
        };
        let kubeconfig = cluster.kubeconfig_with_token_file(&access.token_file());
        fs::write(access.kubeconfig(), kubeconfig).context("writing a kubeconfig")?;
        // The first follows none.
        let Former(_) = access.renew(cluster).await?;
        Ok(access)
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.path().join("kubeconfig")
    }

    pub fn token_file(&self) -> PathBuf {
        self.folder.path().join("token")
    }

    /// As apiserver and RBAC call it.
    pub fn username(&self) -> String {
        username(&self.namespace, &self.account)
    }

    /// What the audit log calls the token in the file.
    pub fn credential(&self) -> Result<String> {
        let token = fs::read_to_string(self.token_file()).context("reading a token")?;
        let claims = token.split('.').nth(1).context("a token without claims")?;
        let claims: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims)?)?;
        let id = claims.get("jti").and_then(Value::as_str);
        Ok(format!("JTI={}", id.context("a token without a name")?))
    }

    /// Puts a new token into the file, as the kubelet does; the former one is good until the
    /// returned one is given to `revoke`.
    pub async fn renew(&mut self, cluster: &Cluster) -> Result<Former> {
        let client = cluster.client();
        let (secret, token) = self.bound_token(&client).await?;
        replace(&self.token_file(), &token)?;
        let former = std::mem::replace(&mut self.bound_to, secret);
        Ok(Former(former))
    }

    /// Makes a token worthless, at the latest when the apiserver's cache of ten seconds runs out.
    pub async fn revoke(&self, cluster: &Cluster, former: Former) -> Result<()> {
        let secrets: Api<Secret> = Api::namespaced(cluster.client(), &self.namespace);
        secrets.delete(&former.0, &DeleteParams::default()).await?;
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
        let made = accounts
            .create_token_request(&self.account, &PostParams::default(), &request)
            .await
            .with_context(|| format!("asking for a token of {}", self.username()))?;
        let token = made.status.context("no token in the answer")?.token;
        Ok((secret.name_any(), token))
    }
}

/// A token that is no longer in the file.
#[derive(Debug)]
#[must_use = "it is good until it is revoked"]
pub struct Former(String);

/// A service account as apiserver and RBAC call it.
pub fn username(namespace: &str, account: &str) -> String {
    format!("system:serviceaccount:{namespace}:{account}")
}

/// At once, as a mounted volume does.
fn replace(file: &Path, content: &str) -> Result<()> {
    let next = file.with_extension("next");
    fs::write(&next, content).context("writing a token")?;
    fs::rename(next, file).context("putting a token in place")
}
