//! `helm rollback`.

use krypton_helm::releases::Status;

use crate::fault::{Cause, Fault};
use crate::objects::Update;
use crate::release::{Info, Release, now};
use crate::session::Session;

impl Session {
    /// Creates a revision from an old one. As in Helm, a failed hook leaves it pending.
    pub(crate) async fn rollback(&self) -> Result<(), Fault> {
        self.api.is_reachable().await?;
        let (mut current, mut target) = self.prepare_rollback().await?;
        self.store(self.flags.history_max).create(&target).await?;
        self.perform_rollback(&mut current, &mut target).await?;
        self.store(0).update(&target).await?;
        self.print("Rollback was a success! Happy Helming!\n");
        Ok(())
    }

    async fn prepare_rollback(&self) -> Result<(Release, Release), Fault> {
        let (name, to) = (&self.release, self.flags.revision);
        let store = self.store(0);
        let current = store.last(name).await?;
        let to = if to == 0 {
            current.version.saturating_sub(1)
        } else {
            to
        };
        let history = store.history(name).await?;
        if !history.iter().any(|release| release.version == to) {
            return Err(Fault::new(format!("release has no {to} version")));
        }
        let previous = store.get(name, to).await?;
        let target = Release {
            info: Info {
                first_deployed: current.info.first_deployed.clone(),
                last_deployed: now(),
                deleted: String::new(),
                description: format!("Rollback to {to}"),
                status: Status::PendingRollback.to_string(),
                notes: previous.info.notes.clone(),
                rollback_revision: to,
            },
            name: name.clone(),
            namespace: current.namespace.clone(),
            version: current.version + 1,
            apply_method: self.way().name().to_owned(),
            ..previous
        };
        Ok((current, target))
    }

    async fn perform_rollback(
        &self,
        current: &mut Release,
        target: &mut Release,
    ) -> Result<(), Fault> {
        let namespace = &self.flags.namespace;
        let originals = self.api.build(&current.manifest, namespace).await;
        let originals = originals.map_err(|fault| {
            fault.within("unable to build kubernetes objects from current release manifest")
        })?;
        let targets = self.api.build(&target.manifest, namespace).await;
        let mut targets = targets.map_err(|fault| {
            fault.within("unable to build kubernetes objects from new release manifest")
        })?;
        if !self.flags.no_hooks {
            self.run_hooks(target, "pre-rollback", self.way()).await?;
        }
        self.owner().mark(&mut targets);
        let update = Update {
            originals: &originals,
            targets: &targets,
            way: self.way(),
            adopts_fields: true,
        };
        if let Err(fault) = update.run(&self.api).await {
            let text = format!("Rollback \"{}\" failed: {fault}", self.release);
            self.log("WARN", &text, &fault.text);
            current.info.status = Status::Superseded.to_string();
            target.set_status(Status::Failed, text);
            self.record(current).await;
            self.record(target).await;
            return Err(fault);
        }
        if !self.flags.no_hooks {
            self.run_hooks(target, "post-rollback", self.way()).await?;
        }
        let deployed = match self.store(0).deployed_all(&self.release).await {
            Err(fault) if fault.cause == Cause::NoDeployedReleases => Vec::new(),
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
