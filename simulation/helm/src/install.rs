//! `helm install`, also as the first `helm upgrade --install`.

use krypton_helm::releases::Status;
use tokio_util::sync::CancellationToken;

use crate::api::Object;
use crate::chart::{Chart, Place};
use crate::fault::Fault;
use crate::objects::{self, Update};
use crate::release::{Info, Release, now};
use crate::session::Session;

/// An installation.
#[derive(Debug)]
pub(crate) struct Install<'a> {
    pub(crate) session: &'a Session,
    pub(crate) chart: &'a Chart,
    /// Whether the name of a failed or uninstalled release may be reused.
    pub(crate) replace: bool,
}

impl Install<'_> {
    /// Runs the installation until `terminate`, which marks the release as failed.
    pub(crate) async fn run(self, terminate: &CancellationToken) -> Result<Release, Fault> {
        let session = self.session;
        session.api.is_reachable().await?;
        if let Err(fault) = self.check_name().await {
            session.log("ERROR", "release name check failed", &fault.text);
            return Err(fault.within("release name check failed"));
        }
        if !session.flags.skip_crds {
            self.install_crds().await?;
        }
        session.api.is_reachable().await?;
        let mut release = self.release()?;
        let namespace = &session.flags.namespace;
        let built = session.api.build(&release.manifest, namespace).await;
        let mut targets = built.map_err(|fault| {
            fault.within("unable to build kubernetes objects from release manifest")
        })?;
        session.owner().mark(&mut targets);
        let adopted = objects::existing(&session.api, &targets, session.owner()).await;
        let adopted = adopted.map_err(|fault| fault.within("unable to continue with install"))?;
        if self.replace {
            self.replace_last(&mut release).await?;
        }
        session.store(0).create(&release).await?;
        let result = tokio::select! {
            biased;
            () = terminate.cancelled() => Err(Fault::new("context canceled")),
            result = Box::pin(self.perform(&mut release, &adopted, &targets)) => result,
        };
        if let Err(fault) = result {
            let name = &session.release;
            release.set_status(
                Status::Failed,
                format!("Release \"{name}\" failed: {fault}"),
            );
            session.record(&release).await;
            return Err(fault);
        }
        Ok(release)
    }

    async fn check_name(&self) -> Result<(), Fault> {
        let history = self.session.store(0).history(&self.session.release).await;
        // Helm ignores errors here.
        let Some(last) = history.ok().and_then(|mut history| history.pop()) else {
            return Ok(());
        };
        let reusable = [Status::Uninstalled, Status::Failed].contains(&last.status());
        if self.replace && reusable {
            return Ok(());
        }
        Err(Fault::new("cannot reuse a name that is still in use"))
    }

    async fn install_crds(&self) -> Result<(), Fault> {
        let session = self.session;
        for (file, text) in &self.chart.crds {
            let failed = |fault: Fault| fault.within(format_args!("failed to install CRD {file}"));
            let namespace = &session.flags.namespace;
            let objects = session.api.build(text, namespace).await.map_err(failed)?;
            match objects::create(&session.api, &objects, session.way()).await {
                Err(fault) if fault.is_already_exists() => {}
                created => created.map_err(failed)?,
            }
        }
        Ok(())
    }

    fn release(&self) -> Result<Release, Fault> {
        let session = self.session;
        let place = Place {
            release: &session.release,
            namespace: &session.flags.namespace,
            // As in Helm, the templates always see the first revision.
            revision: 1,
        };
        let rendered = self.chart.render(place)?;
        let at = now();
        Ok(Release {
            name: session.release.clone(),
            namespace: session.flags.namespace.clone(),
            info: Info {
                first_deployed: at.clone(),
                last_deployed: at,
                status: Status::PendingInstall.to_string(),
                description: "Initial install underway".to_owned(),
                ..Info::default()
            },
            chart: self.chart.stored.clone(),
            config: self.chart.config.clone(),
            manifest: rendered.manifest,
            hooks: rendered.hooks,
            version: 1,
            apply_method: session.way().name().to_owned(),
            labels: session.flags.labels.clone(),
        })
    }

    async fn replace_last(&self, release: &mut Release) -> Result<(), Fault> {
        let store = self.session.store(0);
        let history = store.history(&release.name).await;
        let Some(mut last) = history.ok().and_then(|mut history| history.pop()) else {
            return Ok(());
        };
        release.version = last.version + 1;
        if last.status() == Status::Failed {
            return Ok(());
        }
        last.set_status(Status::Superseded, "superseded by new release");
        store.update(&last).await
    }

    async fn perform(
        &self,
        release: &mut Release,
        adopted: &[Object],
        targets: &[Object],
    ) -> Result<(), Fault> {
        let session = self.session;
        let way = session.way();
        if !session.flags.no_hooks {
            let hooks = session.run_hooks(release, "pre-install", way).await;
            hooks.map_err(|fault| fault.within("failed pre-install"))?;
        }
        if adopted.is_empty() && !targets.is_empty() {
            objects::create(&session.api, targets, way.gently()).await?;
        } else if !targets.is_empty() {
            let update = Update {
                originals: adopted,
                targets,
                way,
                adopts_fields: true,
            };
            update.run(&session.api).await?;
        }
        if !session.flags.no_hooks {
            let hooks = session.run_hooks(release, "post-install", way).await;
            hooks.map_err(|fault| fault.within("failed post-install"))?;
        }
        let description = match session.flags.description.as_str() {
            "" => "Install complete",
            given => given,
        };
        release.set_status(Status::Deployed, description);
        // Helm reports success even if it can't record it.
        session.record(release).await;
        Ok(())
    }
}
