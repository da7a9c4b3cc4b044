//! `helm upgrade` of an existing release.

use krypton_helm::releases::Status;
use tokio_util::sync::CancellationToken;

use crate::api::Object;
use crate::chart::{Chart, Place};
use crate::fault::{Cause, Fault};
use crate::objects::{self, Update, Way};
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
    pub(crate) async fn run(self, terminate: &CancellationToken) -> Result<Release, Fault> {
        let session = self.session;
        session.api.is_reachable().await?;
        let (mut current, mut upgraded) = self.prepare().await?;
        let namespace = &session.flags.namespace;
        let build = session.api.build(&current.manifest, namespace).await;
        let mut originals = build.map_err(|fault| {
            fault.within("unable to build kubernetes objects from current release manifest")
        })?;
        let build = session.api.build(&upgraded.manifest, namespace).await;
        let mut targets = build.map_err(|fault| {
            fault.within("unable to build kubernetes objects from new release manifest")
        })?;
        session.owner().mark(&mut targets);
        let adopted = self.adopted(&originals, &targets).await?;
        originals.extend(adopted);
        let store = session.store(session.flags.history_max);
        store.create(&upgraded).await?;
        let result = tokio::select! {
            biased;
            () = terminate.cancelled() => Err(Fault::new("context canceled")),
            result = Box::pin(self.perform(&mut current, &mut upgraded, &originals, &targets)) => result,
        };
        if let Err(fault) = result {
            session.log("WARN", "upgrade failed", &fault.text);
            let name = &session.release;
            upgraded.set_status(
                Status::Failed,
                format!("Upgrade \"{name}\" failed: {fault}"),
            );
            session.record(&upgraded).await;
            return Err(fault);
        }
        store.update(&upgraded).await?;
        Ok(upgraded)
    }

    /// Returns the revision to compare with, and the new revision.
    async fn prepare(&self) -> Result<(Release, Release), Fault> {
        let session = self.session;
        let name = &session.release;
        let store = session.store(0);
        let last = store.last(name).await.map_err(|fault| match fault.cause {
            Cause::ReleaseNotFound => Fault::no_deployed_releases(name),
            _ => fault,
        })?;
        if last.status().is_pending() {
            return Err(Fault::new(
                "another operation (install/upgrade/rollback) is in progress",
            ));
        }
        let current = if last.status() == Status::Deployed {
            last.clone()
        } else {
            let replaceable = [Status::Failed, Status::Superseded].contains(&last.status());
            match store.deployed(name).await {
                Err(fault) if fault.cause == Cause::NoDeployedReleases && replaceable => {
                    last.clone()
                }
                deployed => deployed?,
            }
        };
        session.api.is_reachable().await?;
        let upgraded = self.upgraded(&current, last)?;
        // Helm validates the new manifest before it stores anything.
        let namespace = &session.flags.namespace;
        session.api.build(&upgraded.manifest, namespace).await?;
        Ok((current, upgraded))
    }

    fn upgraded(&self, current: &Release, last: Release) -> Result<Release, Fault> {
        let session = self.session;
        let version = last.version + 1;
        let place = Place {
            release: &session.release,
            namespace: &current.namespace,
            revision: version,
        };
        let rendered = self.chart.render(place)?;
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
            apply_method: session.way().name().to_owned(),
            labels,
        })
    }

    /// Returns the new objects that exist already and belong to the release.
    async fn adopted(
        &self,
        originals: &[Object],
        targets: &[Object],
    ) -> Result<Vec<Object>, Fault> {
        let same = |one: &Object, other: &Object| {
            one.matches(other) && one.api_version == other.api_version
        };
        let known = |target: &&Object| originals.iter().any(|original| same(original, target));
        let new: Vec<Object> = targets
            .iter()
            .filter(|target| !known(target))
            .cloned()
            .collect();
        let session = self.session;
        let existing = objects::existing(&session.api, &new, session.owner()).await;
        existing.map_err(|fault| fault.within("unable to continue with update"))
    }

    async fn perform(
        &self,
        current: &mut Release,
        upgraded: &mut Release,
        originals: &[Object],
        targets: &[Object],
    ) -> Result<(), Fault> {
        let session = self.session;
        let way = session.way();
        if !session.flags.no_hooks {
            let hooks = session.run_hooks(upgraded, "pre-upgrade", way).await;
            hooks.map_err(|fault| fault.within("pre-upgrade hooks failed"))?;
        }
        let update = Update {
            originals,
            targets,
            way,
            adopts_fields: Way::of_name(&current.apply_method) == Way::ClientSide,
        };
        if let Err(fault) = update.run(&session.api).await {
            session.record(current).await;
            return Err(fault);
        }
        if !session.flags.no_hooks {
            let hooks = session.run_hooks(upgraded, "post-upgrade", way).await;
            hooks.map_err(|fault| fault.within("post-upgrade hooks failed"))?;
        }
        current.info.status = Status::Superseded.to_string();
        session.record(current).await;
        let description = match session.flags.description.as_str() {
            "" => "Upgrade complete",
            given => given,
        };
        upgraded.set_status(Status::Deployed, description);
        Ok(())
    }
}
