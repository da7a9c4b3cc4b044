//! `helm rollback`.

use krypton_helm::releases::Status;

use crate::fault::{ErrorCause, HelmError};
use crate::objects::Update;
use crate::release::{Info, Release, now};
use crate::session::Session;

impl Session {
    /// Creates a revision from an old one. As in Helm, a failed hook leaves it pending.
    pub(crate) async fn rollback(&self) -> Result<(), HelmError> {
        self.api.check_reachable().await?;
        let (mut current, mut target) = self.prepare_rollback().await?;
        self.store(self.flags.history_max).create(&target).await?;
        self.perform_rollback(&mut current, &mut target).await?;
        self.store(0).update(&target).await?;
        self.print("Rollback was a success! Happy Helming!\n");
        Ok(())
    }

    async fn prepare_rollback(&self) -> Result<(Release, Release), HelmError> {
        let name = &self.release;
        let store = self.store(0);
        let current = store.last(name).await?;
        let revision = match self.flags.revision {
            0 => current.version.saturating_sub(1),
            revision => revision,
        };
        let history = store.history(name).await?;
        if !history.iter().any(|release| release.version == revision) {
            return Err(HelmError::new(format!("release has no {revision} version")));
        }
        let previous = store.get(name, revision).await?;
        let target = Release {
            info: Info {
                first_deployed: current.info.first_deployed.clone(),
                last_deployed: now(),
                deleted: String::new(),
                description: format!("Rollback to {revision}"),
                status: Status::PendingRollback.to_string(),
                notes: previous.info.notes.clone(),
                rollback_revision: revision,
            },
            name: name.clone(),
            namespace: current.namespace.clone(),
            version: current.version + 1,
            apply_method: self.write_method().name().to_owned(),
            ..previous
        };
        Ok((current, target))
    }

    async fn perform_rollback(
        &self,
        current: &mut Release,
        target: &mut Release,
    ) -> Result<(), HelmError> {
        let originals = self.build(&current.manifest, "current release").await?;
        let mut targets = self.build(&target.manifest, "new release").await?;
        self.run_hooks(target, "pre-rollback", self.write_method())
            .await?;
        self.owner().mark(&mut targets);
        let update = Update {
            originals: &originals,
            targets: &targets,
            method: self.write_method(),
            adopts_fields: true,
        };
        if let Err(error) = update.run(&self.api).await {
            let message = format!("Rollback \"{}\" failed: {error}", self.release);
            self.log("WARN", &message, &error.message);
            current.info.status = Status::Superseded.to_string();
            target.set_status(Status::Failed, message);
            self.record(current).await;
            self.record(target).await;
            return Err(error);
        }
        self.run_hooks(target, "post-rollback", self.write_method())
            .await?;
        let deployed = match self.store(0).all_deployed(&self.release).await {
            Err(error) if error.cause == ErrorCause::NoDeployedReleases => Vec::new(),
            deployed => deployed?,
        };
        for mut release in deployed {
            release.info.status = Status::Superseded.to_string();
            self.record(&release).await;
        }
        target.info.status = Status::Deployed.to_string();
        Ok(())
    }
}
