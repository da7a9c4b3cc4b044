//! Reads and changes the release in one of Helm's Secrets.

use std::io::Read;

use anyhow::{Context, Result};
use base64::{Engine, prelude::BASE64_STANDARD};
use flate2::read::GzDecoder;
use k8s_openapi::{ByteString, api::core::v1::Secret};
use krypton_helm::releases::{DATA_KEY, pack};
use serde_json::Value;

/// Decodes base64, then gzip, then JSON.
pub fn read(secret: &Secret) -> Result<Value> {
    let data = secret.data.as_ref().and_then(|data| data.get(DATA_KEY));
    let packed = BASE64_STANDARD.decode(&data.context("no payload")?.0)?;
    let mut json = Vec::new();
    GzDecoder::new(packed.as_slice()).read_to_end(&mut json)?;
    Ok(serde_json::from_slice(&json)?)
}

/// Changes the release in this Secret, but not its labels.
pub fn rewrite(secret: &mut Secret, change: &impl Fn(&mut Value)) -> Result<()> {
    let mut release = read(secret)?;
    change(&mut release);
    let packed = pack(release.to_string().as_bytes())?;
    let data = secret.data.get_or_insert_default();
    data.insert(DATA_KEY.to_owned(), ByteString(packed));
    Ok(())
}
