//! `helm install`, also as the first `helm upgrade --install`.

use krypton_helm::releases::Status;
use tokio_util::sync::CancellationToken;

use crate::api::Object;
use crate::chart::{Chart, RenderContext};
use crate::fault::HelmError;
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
    pub(crate) async fn run(self, terminate: &CancellationToken) -> Result<Release, HelmError> {
        let session = self.session;
        session.api.check_reachable().await?;
        if let Err(error) = self.check_name().await {
            session.log("ERROR", "release name check failed", &error.message);
            return Err(error.context("release name check failed"));
        }
        if !session.flags.skip_crds {
            self.install_crds().await?;
        }
        session.api.check_reachable().await?;
        let mut release = self.new_release()?;
        let mut targets = session.build(&release.manifest, "release").await?;
        session.owner().mark(&mut targets);
        let adopted = objects::find_owned(&session.api, &targets, session.owner()).await;
        let adopted = adopted.map_err(|error| error.context("unable to continue with install"))?;
        if self.replace {
            self.replace_last(&mut release).await?;
        }
        session.store(0).create(&release).await?;
        let result = tokio::select! {
            biased;
            () = terminate.cancelled() => Err(HelmError::new("context canceled")),
            result = Box::pin(self.perform_install(&mut release, &adopted, &targets)) => result,
        };
        if let Err(error) = result {
            let name = &session.release;
            release.set_status(
                Status::Failed,
                format!("Release \"{name}\" failed: {error}"),
            );
            session.record(&release).await;
            return Err(error);
        }
        Ok(release)
    }

    async fn check_name(&self) -> Result<(), HelmError> {
        let history = self.session.store(0).history(&self.session.release).await;
        // Helm ignores errors here.
        let Some(last) = history.ok().and_then(|mut history| history.pop()) else {
            return Ok(());
        };
        let reusable = [Status::Uninstalled, Status::Failed].contains(&last.status());
        if self.replace && reusable {
            return Ok(());
        }
        Err(HelmError::new("cannot reuse a name that is still in use"))
    }

    async fn install_crds(&self) -> Result<(), HelmError> {
        let session = self.session;
        for (file, text) in &self.chart.crds {
            let crd_error =
                |error: HelmError| error.context(format_args!("failed to install CRD {file}"));
            let namespace = &session.flags.namespace;
            let objects = session
                .api
                .build(text, namespace)
                .await
                .map_err(crd_error)?;
            match objects::create(&session.api, &objects, session.write_method()).await {
                Err(error) if error.is_already_exists() => {}
                result => result.map_err(crd_error)?,
            }
        }
        Ok(())
    }

    fn new_release(&self) -> Result<Release, HelmError> {
        let session = self.session;
        let context = RenderContext {
            release: &session.release,
            namespace: &session.flags.namespace,
            // As in Helm, the templates always see the first revision.
            revision: 1,
        };
        let rendered = self.chart.render(context)?;
        let time = now();
        Ok(Release {
            name: session.release.clone(),
            namespace: session.flags.namespace.clone(),
            info: Info {
                first_deployed: time.clone(),
                last_deployed: time,
                status: Status::PendingInstall.to_string(),
                description: "Initial install underway".to_owned(),
                ..Info::default()
            },
            chart: self.chart.stored.clone(),
            config: self.chart.config.clone(),
            manifest: rendered.manifest,
            hooks: rendered.hooks,
            version: 1,
            apply_method: session.write_method().name().to_owned(),
            labels: session.flags.labels.clone(),
        })
    }

    async fn replace_last(&self, release: &mut Release) -> Result<(), HelmError> {
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

    async fn perform_install(
        &self,
        release: &mut Release,
        adopted: &[Object],
        targets: &[Object],
    ) -> Result<(), HelmError> {
        let session = self.session;
        let method = session.write_method();
        let hooks = session.run_hooks(release, "pre-install", method).await;
        hooks.map_err(|error| error.context("failed pre-install"))?;
        if adopted.is_empty() && !targets.is_empty() {
            objects::create(&session.api, targets, method.without_force()).await?;
        } else if !targets.is_empty() {
            let update = Update {
                originals: adopted,
                targets,
                method,
                adopts_fields: true,
            };
            update.run(&session.api).await?;
        }
        let hooks = session.run_hooks(release, "post-install", method).await;
        hooks.map_err(|error| error.context("failed post-install"))?;
        let description = match session.flags.description.as_str() {
            "" => "Install complete",
            description => description,
        };
        release.set_status(Status::Deployed, description);
        // Helm reports success even if it can't record it.
        session.record(release).await;
        Ok(())
    }
}
