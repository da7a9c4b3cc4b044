//! Helm's storage: one Secret for each revision.

use http::Method;
use krypton_helm::releases::secret_name;
use serde_json::Value;

use crate::api::Api;
use crate::fault::{ErrorCause, HelmError};
use crate::release::Release;

/// The release Secrets of one namespace.
#[derive(Debug)]
pub(crate) struct Store<'a> {
    pub(crate) api: &'a Api,
    pub(crate) namespace: &'a str,
    /// Maximum number of revisions. 0 means no limit.
    pub(crate) max_history: usize,
}

impl Store<'_> {
    fn collection(&self) -> String {
        format!("/api/v1/namespaces/{}/secrets", self.namespace)
    }

    fn path(&self, release: &str, version: u32) -> String {
        format!("{}/{}", self.collection(), secret_name(release, version))
    }

    /// Returns the revisions with these labels, oldest first. As in Helm, undecodable Secrets are skipped.
    async fn query(&self, selector: &str) -> Result<Vec<Release>, HelmError> {
        let selector = selector.replace('=', "%3D").replace(',', "%2C");
        let path = format!("{}?labelSelector={selector}", self.collection());
        let list = self.api.read(&path).await;
        let list = list.map_err(|error| error.context("query: failed to query with labels"))?;
        let items = list.get("items").and_then(Value::as_array);
        let items = items.map(Vec::as_slice).unwrap_or_default();
        if items.is_empty() {
            return Err(HelmError::release_not_found());
        }
        let mut releases: Vec<Release> = items
            .iter()
            .filter_map(|item| Release::decode(item).ok())
            .collect();
        releases.sort_by_key(|release| release.version);
        Ok(releases)
    }

    /// Returns all revisions, oldest first.
    pub(crate) async fn history(&self, release: &str) -> Result<Vec<Release>, HelmError> {
        self.query(&format!("name={release},owner=helm")).await
    }

    pub(crate) async fn last(&self, release: &str) -> Result<Release, HelmError> {
        let last = self.history(release).await?.pop();
        last.ok_or_else(|| HelmError::new(format!("no revision for release \"{release}\"")))
    }

    pub(crate) async fn all_deployed(&self, release: &str) -> Result<Vec<Release>, HelmError> {
        let selector = format!("name={release},owner=helm,status=deployed");
        self.query(&selector).await.map_err(|error| {
            if error.message.contains("not found") {
                HelmError::no_deployed_releases(release)
            } else {
                error
            }
        })
    }

    pub(crate) async fn deployed(&self, release: &str) -> Result<Release, HelmError> {
        let last = self.all_deployed(release).await?.pop();
        last.ok_or_else(|| HelmError::no_deployed_releases(release))
    }

    pub(crate) async fn get(&self, release: &str, version: u32) -> Result<Release, HelmError> {
        let key = secret_name(release, version);
        let secret = self.api.read(&self.path(release, version)).await;
        let secret = secret.map_err(|error| {
            if error.is_not_found() {
                HelmError::release_not_found()
            } else {
                error.context(format_args!("get: failed to get \"{key}\""))
            }
        })?;
        let mut decoded = Release::decode(&secret)
            .map_err(|error| error.context(format_args!("get: failed to decode data \"{key}\"")))?;
        decoded.drop_system_labels();
        Ok(decoded)
    }

    /// Creates the Secret of a new revision, which locks the release. Removes old revisions first.
    pub(crate) async fn create(&self, release: &Release) -> Result<(), HelmError> {
        if self.max_history > 0 {
            match self.prune(&release.name, self.max_history - 1).await {
                Err(error) if error.cause != ErrorCause::ReleaseNotFound => return Err(error),
                _ => {}
            }
        }
        let secret = release.encode("createdAt")?;
        let path = self.collection();
        let created = self.api.write(Method::POST, &path, Some(&secret)).await;
        created.map(drop).map_err(|error| {
            if error.is_already_exists() {
                HelmError::new("release: already exists")
            } else {
                error.context("create: failed to create")
            }
        })
    }

    pub(crate) async fn update(&self, release: &Release) -> Result<(), HelmError> {
        let secret = release.encode("modifiedAt")?;
        let path = self.path(&release.name, release.version);
        let updated = self.api.write(Method::PUT, &path, Some(&secret)).await;
        updated
            .map(drop)
            .map_err(|error| error.context("update: failed to update"))
    }

    pub(crate) async fn delete(&self, release: &str, version: u32) -> Result<(), HelmError> {
        self.get(release, version).await?;
        let path = self.path(release, version);
        self.api.write(Method::DELETE, &path, None).await.map(drop)
    }

    async fn prune(&self, release: &str, limit: usize) -> Result<(), HelmError> {
        let history = self.history(release).await?;
        if history.len() <= limit {
            return Ok(());
        }
        let deployed = match self.deployed(release).await {
            Err(error) if error.cause == ErrorCause::NoDeployedReleases => None,
            deployed => Some(deployed?.version),
        };
        let surplus = history.len() - limit;
        let versions = history.iter().map(|revision| revision.version);
        let versions = versions
            .filter(|version| Some(*version) != deployed)
            .take(surplus);
        let mut errors = Vec::new();
        for version in versions {
            errors.extend(self.delete(release, version).await.err());
        }
        match errors.as_slice() {
            [] => Ok(()),
            [error] => Err(error.clone()),
            [first, ..] => Err(first.clone().context(format_args!(
                "encountered {} deletion errors. First is",
                errors.len()
            ))),
        }
    }
}
