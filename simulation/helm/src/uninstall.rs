//! `helm uninstall`.

use krypton_helm::releases::Status;

use crate::fault::HelmError;
use crate::kinds;
use crate::objects::{self, WriteMethod};
use crate::release::{Release, now};
use crate::session::Session;

const HOOK_METHOD: WriteMethod = WriteMethod::ServerSide { force: false };

impl Session {
    /// Uninstalls the release and deletes its history.
    pub(crate) async fn uninstall(&self) -> Result<(), HelmError> {
        self.api.check_reachable().await?;
        let name = &self.release;
        let history = self.store(0).history(name).await;
        let mut history = history.map_err(|error| {
            error.context(format_args!("uninstall: Release not loaded: {name}"))
        })?;
        let Some(release) = history.last_mut() else {
            return Err(HelmError::new("no release provided"));
        };
        if release.status() == Status::Uninstalled {
            return self.purge(&history).await;
        }
        release.info.deleted = now();
        release.set_status(
            Status::Uninstalling,
            "Deletion in progress (or silently failed)",
        );
        self.run_hooks(release, "pre-delete", HOOK_METHOD).await?;
        // Helm ignores errors here.
        drop(self.store(0).update(release).await);
        let kept = self.delete_objects(release).await?;
        let mut errors = Vec::new();
        let hooks = self.run_hooks(release, "post-delete", HOOK_METHOD).await;
        errors.extend(hooks.err());
        errors.extend(self.purge(&history).await.err());
        if let Some(error) = HelmError::join(&errors, "; ") {
            let count = errors.len();
            return Err(error.context(format_args!(
                "uninstallation completed with {count} error(s)"
            )));
        }
        if !kept.is_empty() {
            self.print(&format!("{kept}\n"));
        }
        self.print(&format!("release \"{name}\" uninstalled\n"));
        Ok(())
    }

    /// Deletes the objects of the release. Returns a text about the objects that Helm keeps.
    async fn delete_objects(&self, release: &Release) -> Result<String, HelmError> {
        let deletion_error =
            || HelmError::new(format!("failed to delete release: {}", self.release));
        let built = self
            .api
            .build(&release.manifest, &self.flags.namespace)
            .await;
        let mut targets = built.map_err(|_| deletion_error())?;
        targets.sort_by(|one, other| kinds::uninstall_order(&one.kind, &other.kind));
        let (kept, targets): (Vec<_>, Vec<_>) = targets.into_iter().partition(objects::is_kept);
        let owned = objects::retain_owned(&self.api, targets, self.owner()).await;
        if !objects::delete(&self.api, &owned).await.is_empty() {
            return Err(deletion_error());
        }
        let mut text = String::new();
        if !kept.is_empty() {
            text.push_str("These resources were kept due to the resource policy:\n");
        }
        for object in kept {
            text.push_str(&format!("[{}] {}\n", object.kind, object.name));
        }
        Ok(text)
    }

    async fn purge(&self, history: &[Release]) -> Result<(), HelmError> {
        for release in history {
            let deleted = self.store(0).delete(&release.name, release.version).await;
            deleted.map_err(|error| error.context("uninstall: Failed to purge the release"))?;
        }
        Ok(())
    }
}
