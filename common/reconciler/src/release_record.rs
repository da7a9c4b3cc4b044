//! Reads and writes release records.

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{ReleaseRecord, name};
use krypton_runtime::call::if_unchanged;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use kube::api::{Api, PostParams};
use kube::{Client, ResourceExt as _};

/// Reads the record of a release. Returns an empty record if none exists.
///
/// # Errors
/// If the request to the API server fails.
pub async fn read(client: &Client, release: &ReleaseKey) -> kube::Result<ReleaseRecord> {
    let secret = api(client).get_opt(&name(release)).await?;
    Ok(ReleaseRecord::from_secret(secret, release))
}

/// Replaces the version of the record that was read, or creates the record.
///
/// # Errors 409 if it has changed since, or if a new record already exists.
pub(crate) async fn write(
    record: &ReleaseRecord,
    client: &Client,
    release: &ReleaseKey,
) -> kube::Result<()> {
    let secret = record.to_secret(release).map_err(kube::Error::SerdeError)?;
    let (api, params) = (api(client), PostParams::default());
    let name = secret.name_any();
    match record.exists() {
        true => api.replace(&name, &params, &secret).await?,
        false => api.create(&params, &secret).await?,
    };
    Ok(())
}

/// Deletes the record, if it is still the version that was read.
///
/// # Errors 404 or 409 if it was deleted or changed since.
pub(crate) async fn delete(record: &ReleaseRecord, client: &Client) -> kube::Result<()> {
    let Some(secret) = record.secret() else {
        return Ok(());
    };
    let (api, name) = (api(client), secret.name_any());
    api.delete(&name, &if_unchanged(&secret.metadata)).await?;
    Ok(())
}

fn api(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), SYSTEM_NAMESPACE)
}
