//! Reads and writes the records of releases.

use k8s_openapi::api::core::v1::Secret;
use krypton_helm::releases::labels::ReleaseKey;
use krypton_helm::releases::record::{ReleaseRecord, name};
use krypton_runtime::effect;
use krypton_runtime::lease::SYSTEM_NAMESPACE;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::{Client, ResourceExt as _};

/// Reads the record of a release; an empty one if there is none.
///
/// # Errors
/// If the API server does not return it.
pub async fn read(client: &Client, release: &ReleaseKey) -> kube::Result<ReleaseRecord> {
    let secret = api(client).get_opt(&name(release)).await?;
    Ok(ReleaseRecord::of(secret, release))
}

/// Writes the record over the version that it was read from.
///
/// # Errors
/// 409 if it has changed since, or if a new record exists already.
pub(crate) async fn write(
    record: &ReleaseRecord,
    client: &Client,
    release: &ReleaseKey,
) -> kube::Result<()> {
    let secret = record.to_secret(release).map_err(kube::Error::SerdeError)?;
    let (api, params) = (api(client), PostParams::default());
    let name = secret.name_any();
    match record.exists() {
        true => {
            effect!(
                "release-record.replace",
                api.replace(&name, &params, &secret)
            )
            .await?
        }
        false => effect!("release-record.create", api.create(&params, &secret)).await?,
    };
    Ok(())
}

/// Deletes the record, if it is still the one that was read.
///
/// # Errors
/// 404 and 409 if it has gone or changed since.
pub(crate) async fn delete(record: &ReleaseRecord, client: &Client) -> kube::Result<()> {
    let Some(secret) = record.secret() else {
        return Ok(());
    };
    let params = DeleteParams {
        preconditions: Some(Preconditions {
            uid: secret.uid(),
            resource_version: secret.resource_version(),
        }),
        ..DeleteParams::default()
    };
    let (api, name) = (api(client), secret.name_any());
    effect!("release-record.delete", api.delete(&name, &params)).await?;
    Ok(())
}

fn api(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), SYSTEM_NAMESPACE)
}
