package pgsieve.lake;

import io.delta.storage.S3SingleDriverLogStore;
import java.io.ByteArrayOutputStream;
import java.io.FileNotFoundException;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.FileAlreadyExistsException;
import java.util.Arrays;
import java.util.Iterator;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.fs.FSDataInputStream;
import org.apache.hadoop.fs.FSDataOutputStream;
import org.apache.hadoop.fs.FSDataOutputStreamBuilder;
import org.apache.hadoop.fs.FileSystem;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.s3a.S3AFileSystem;
import org.apache.hadoop.fs.s3a.S3AUtils;
import org.apache.hadoop.fs.s3a.impl.PutObjectOptions;
import software.amazon.awssdk.core.exception.SdkException;
import software.amazon.awssdk.core.sync.RequestBody;
import software.amazon.awssdk.services.s3.model.PutObjectRequest;

/**
 * Makes commits to Delta tables on S3 that never overwrite the commit of another writer.
 *
 * <p>A commit is one PUT with If-None-Match, which S3 accepts only if no object has the name. Delta's own log store for S3
 * looks whether there is one, and then puts without a condition. So it is safe only among the threads of one driver.
 *
 * <p>The answer to a PUT may be lost after S3 has stored the object. S3A or the SDK then repeats the PUT, and S3 refuses
 * it, because this very commit has the name. So this class reads the object: if it has the same bytes, it is this commit.
 * No other commit has the same bytes, because Delta gives each commit a random txnId. Without a txnId (a user can turn
 * commitInfo off), the object counts as the commit of another writer.
 */
public class ConditionalPutLogStore extends S3SingleDriverLogStore {
    private static final String CONDITION = "fs.option.create.conditional.overwrite";
    private static final String UNIQUE = "\"txnId\":\"";

    public ConditionalPutLogStore(Configuration conf) {
        super(conf);
    }

    /**
     * Writes an object of these lines, as a whole or not at all.
     *
     * @throws FileAlreadyExistsException if another writer has written an object of this name, unless `overwrite`
     * @throws IOException if the object was not written, or if that is unknown; never if the object is known to be there
     */
    @Override
    public void write(Path path, Iterator<String> lines, Boolean overwrite, Configuration conf) throws IOException {
        if (overwrite) {
            super.write(path, lines, true, conf);
            return;
        }
        // The content is complete before the stream is opened. Closing a stream that has only a part would write that part.
        byte[] content = joined(lines);
        FileSystem files = path.getFileSystem(conf);
        try {
            put(files, path, content);
        } catch (IOException failure) {
            if (!isThere(files, path, content, failure)) {
                throw failure;
            }
        }
    }

    private static byte[] joined(Iterator<String> lines) {
        ByteArrayOutputStream content = new ByteArrayOutputStream();
        while (lines.hasNext()) {
            content.writeBytes(lines.next().getBytes(StandardCharsets.UTF_8));
            content.write('\n');
        }
        return content.toByteArray();
    }

    private static void put(FileSystem files, Path path, byte[] content) throws IOException {
        FSDataOutputStreamBuilder<?, ?> builder = files.createFile(path);
        // With `must`, a file system that does not know the condition refuses the write.
        builder.create().overwrite(true).recursive().must(CONDITION, true);
        FSDataOutputStream stream;
        try {
            stream = (FSDataOutputStream) builder.build();
        } catch (IllegalArgumentException unknown) {
            if (!(files instanceof S3AFileSystem)) {
                throw unknown;
            }
            putByClient((S3AFileSystem) files, path, content);
            return;
        }
        try {
            stream.write(content);
        } catch (IOException | RuntimeException failure) {
            stream.abort();
            throw failure;
        }
        stream.close();
    }

    /** Does the same as `put`, by the client of S3A. Before Hadoop 3.4.2 only the client has the condition, and not S3A. */
    private static void putByClient(S3AFileSystem files, Path path, byte[] content) throws IOException {
        String key = files.pathToKey(path);
        try {
            PutObjectRequest request = files.getRequestFactory()
                    .newPutObjectRequestBuilder(key, PutObjectOptions.keepingDirs(), content.length, false)
                    .ifNoneMatch("*")
                    .build();
            files.getS3AInternals().getAmazonS3Client(CONDITION).putObject(request, RequestBody.fromBytes(content));
        } catch (SdkException failure) {
            throw S3AUtils.translateException("PUT", path, failure);
        }
    }

    /** True if the object exists and is this commit. Raises FileAlreadyExistsException if it is another writer's commit. */
    private static boolean isThere(FileSystem files, Path path, byte[] content, IOException failure) throws IOException {
        byte[] stored = new byte[content.length];
        boolean same;
        try (FSDataInputStream stream = files.open(path)) {
            int length = stream.readNBytes(stored, 0, stored.length);
            same = length == content.length && stream.read() < 0 && Arrays.equals(stored, content);
        } catch (FileNotFoundException missing) {
            return false;
        } catch (IOException unreadable) {
            failure.addSuppressed(unreadable);
            return false;
        }
        if (same && isUnique(content)) {
            return true;
        }
        FileAlreadyExistsException taken = new FileAlreadyExistsException(path.toString());
        taken.initCause(failure);
        throw taken;
    }

    private static boolean isUnique(byte[] content) {
        return new String(content, StandardCharsets.UTF_8).contains(UNIQUE);
    }
}
