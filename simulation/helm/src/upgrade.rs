//! `helm upgrade` of an existing release.

use krypton_helm::releases::Status;
use tokio_util::sync::CancellationToken;

use crate::api::Object;
use crate::chart::{Chart, RenderContext};
use crate::fault::{ErrorCause, HelmError};
use crate::objects::{self, Update, WriteMethod};
use crate::release::{Info, Release, now};
use crate::session::Session;

/// An upgrade.
#[derive(Debug)]
pub(crate) struct Upgrade<'a> {
    pub(crate) session: &'a Session,
    pub(crate) chart: &'a Chart,
}

impl Upgrade<'_> {
    /// Runs the upgrade until `terminate`, which marks the new revision as failed.
    pub(crate) async fn run(self, terminate: &CancellationToken) -> Result<Release, HelmError> {
        let session = self.session;
        session.api.check_reachable().await?;
        let (mut current, mut upgraded) = self.prepare().await?;
        let mut originals = session.build(&current.manifest, "current release").await?;
        let mut targets = session.build(&upgraded.manifest, "new release").await?;
        session.owner().mark(&mut targets);
        let adopted = self.find_adopted(&originals, &targets).await?;
        originals.extend(adopted);
        let store = session.store(session.flags.history_max);
        store.create(&upgraded).await?;
        let result = tokio::select! {
            biased;
            () = terminate.cancelled() => Err(HelmError::new("context canceled")),
            result = Box::pin(self.perform_upgrade(&mut current, &mut upgraded, &originals, &targets)) => result,
        };
        if let Err(error) = result {
            session.log("WARN", "upgrade failed", &error.message);
            let name = &session.release;
            upgraded.set_status(
                Status::Failed,
                format!("Upgrade \"{name}\" failed: {error}"),
            );
            session.record(&upgraded).await;
            return Err(error);
        }
        store.update(&upgraded).await?;
        Ok(upgraded)
    }

    /// Returns the revision to compare with, and the new revision.
    async fn prepare(&self) -> Result<(Release, Release), HelmError> {
        let session = self.session;
        let name = &session.release;
        let store = session.store(0);
        let last = store.last(name).await.map_err(|error| match error.cause {
            ErrorCause::ReleaseNotFound => HelmError::no_deployed_releases(name),
            _ => error,
        })?;
        if last.status().is_pending() {
            return Err(HelmError::new(
                "another operation (install/upgrade/rollback) is in progress",
            ));
        }
        let current = if last.status() == Status::Deployed {
            last.clone()
        } else {
            let replaceable = [Status::Failed, Status::Superseded].contains(&last.status());
            match store.deployed(name).await {
                Err(error) if error.cause == ErrorCause::NoDeployedReleases && replaceable => {
                    last.clone()
                }
                deployed => deployed?,
            }
        };
        session.api.check_reachable().await?;
        let upgraded = self.new_revision(&current, last)?;
        // Helm validates the new manifest before it stores anything.
        let namespace = &session.flags.namespace;
        session.api.build(&upgraded.manifest, namespace).await?;
        Ok((current, upgraded))
    }

    fn new_revision(&self, current: &Release, last: Release) -> Result<Release, HelmError> {
        let session = self.session;
        let version = last.version + 1;
        let context = RenderContext {
            release: &session.release,
            namespace: &current.namespace,
            revision: version,
        };
        let rendered = self.chart.render(context)?;
        let mut labels = last.labels;
        labels.extend(session.flags.labels.clone());
        labels.retain(|_, value| value != "null");
        Ok(Release {
            name: session.release.clone(),
            namespace: current.namespace.clone(),
            info: Info {
                first_deployed: current.info.first_deployed.clone(),
                last_deployed: now(),
                status: Status::PendingUpgrade.to_string(),
                description: "Preparing upgrade".to_owned(),
                ..Info::default()
            },
            chart: self.chart.stored.clone(),
            config: self.chart.config.clone(),
            manifest: rendered.manifest,
            hooks: rendered.hooks,
            version,
            apply_method: session.write_method().name().to_owned(),
            labels,
        })
    }

    /// Returns the new objects that exist already and belong to the release.
    async fn find_adopted(
        &self,
        originals: &[Object],
        targets: &[Object],
    ) -> Result<Vec<Object>, HelmError> {
        let is_same = |one: &Object, other: &Object| {
            one.matches(other) && one.api_version == other.api_version
        };
        let is_original =
            |target: &&Object| originals.iter().any(|original| is_same(original, target));
        let new: Vec<Object> = targets
            .iter()
            .filter(|target| !is_original(target))
            .cloned()
            .collect();
        let session = self.session;
        let existing = objects::find_owned(&session.api, &new, session.owner()).await;
        existing.map_err(|error| error.context("unable to continue with update"))
    }

    async fn perform_upgrade(
        &self,
        current: &mut Release,
        upgraded: &mut Release,
        originals: &[Object],
        targets: &[Object],
    ) -> Result<(), HelmError> {
        let session = self.session;
        let method = session.write_method();
        let hooks = session.run_hooks(upgraded, "pre-upgrade", method).await;
        hooks.map_err(|error| error.context("pre-upgrade hooks failed"))?;
        let update = Update {
            originals,
            targets,
            method,
            adopts_fields: WriteMethod::from_name(&current.apply_method) == WriteMethod::ClientSide,
        };
        if let Err(error) = update.run(&session.api).await {
            session.record(current).await;
            return Err(error);
        }
        let hooks = session.run_hooks(upgraded, "post-upgrade", method).await;
        hooks.map_err(|error| error.context("post-upgrade hooks failed"))?;
        current.info.status = Status::Superseded.to_string();
        session.record(current).await;
        let description = match session.flags.description.as_str() {
            "" => "Upgrade complete",
            description => description,
        };
        upgraded.set_status(Status::Deployed, description);
        Ok(())
    }
}
